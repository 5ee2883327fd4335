"""Runs: built, run, recorded, continued, and kept."""
