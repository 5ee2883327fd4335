"""Commands of many runs and of finished ones; each has a page of its name above, as `experiments/sweep.py`."""
