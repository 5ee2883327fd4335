"""Speed of local training and rounds beside plain PyTorch: `python -m experiments.lab.benchmark`."""
