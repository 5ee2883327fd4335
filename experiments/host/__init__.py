"""The machine: JAX configuration, devices, processes, signals, terminals, and the compilation cache."""
