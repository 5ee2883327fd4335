"""JAX's settings, processes, locks, signals, progress and the cache of compiled programs."""
