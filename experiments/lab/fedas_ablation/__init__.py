"""What FedAS weighs clients by: the runs of docs/fedas.md that measure it."""
