"""Sweeps: `python -m experiments.sweep`."""
