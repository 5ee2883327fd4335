"""Figures of the papers: lists of runs, and functions from their folders to the panels of a picture."""
