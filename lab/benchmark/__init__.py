"""Speed of local training and rounds beside plain PyTorch: `python -m lab.benchmark`."""
