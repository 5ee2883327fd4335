"""Tables of the papers: `python -m experiments.tables`."""
