"""docs/results.md, README's table and the figure, from the results: `python -m experiments.results_page`."""
