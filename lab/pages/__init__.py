"""Pages of the documentation that are made from the committed results: `python -m lab.pages`."""
