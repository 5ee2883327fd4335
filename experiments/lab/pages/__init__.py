"""docs/results.md, README's table and the figure, from committed results: `python -m experiments.lab.pages`."""
