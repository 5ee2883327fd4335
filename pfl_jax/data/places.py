"""Spread of clients over devices."""

import numpy as np


def spread(size: int, devices: int) -> np.ndarray:
    """Ranks int32 [D, ceil(M / D)] of each device's clients, of M that are sorted by size; M in free places, the last.

    The D largest go to the devices in turn, the next D in the reverse order, and so on: loads are balanced, and clients
    of a device that follow each other are of similar size.

    Example:
      >>> from pfl_jax.data import places
      >>> places.spread(5, 2).tolist()
      [[0, 3, 4], [1, 2, 5]]
    """
    ranks = np.arange(-(-size // devices) * devices, dtype=np.int32).reshape(-1, devices)
    ranks[1::2] = ranks[1::2, ::-1]
    return np.minimum(ranks, size).T
