"""Engine: cohorts, rounds on one device or many, sweeps, and states on disk or in host memory."""
