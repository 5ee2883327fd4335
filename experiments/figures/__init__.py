"""Figures of the papers: `python -m experiments.figures --paper fedpac --figure 2`.

A figure is a list of runs and a function from their folders to the panels of a picture.
"""
