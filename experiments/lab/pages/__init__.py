"""Pages of the documentation that are made from the committed results: `python -m experiments.lab.pages`."""
