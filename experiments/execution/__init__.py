"""Execution of runs: build, run, record, resume and cache."""
