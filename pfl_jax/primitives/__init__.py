"""Building blocks of methods: local training, losses, aggregation, statistics, solvers and metrics."""
