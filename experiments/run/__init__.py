"""Execution of runs: build, run, record, resume and cache; the commands of one run and of many."""
