"""Long runs behind docs/results.md, one after another: `python -m lab.queue`."""
