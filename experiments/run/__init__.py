"""Execution of runs: from a `Spec` to its federation, model, method and rounds; its records and its resumption."""
