"""What methods are made of: local training, losses, aggregation, statistics, solvers and metrics."""
