"""Personalized federated learning as pure functions over pytrees.

    import jax
    from pfl_jax import METHODS, models, simulate
    from pfl_jax.data import federated, partition, sources

    dataset = sources.load("digits")
    ...

README.md shows a whole run; `pfl_jax.base` holds every type.
"""
