"""The papers' tables: `python -m experiments.tables`."""
