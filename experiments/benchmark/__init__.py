"""How fast the clients' work runs, beside plain PyTorch: `python -m experiments.benchmark`."""
