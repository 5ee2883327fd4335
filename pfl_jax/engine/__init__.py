"""Engine: cohorts, rounds on one or more devices, sweeps, checkpoints, and client states in host memory."""
