"""The machine: JAX configuration, devices, processes, locks, signals, progress, and the compilation cache."""
