"""Spread of clients over devices."""

import numpy as np


def spread(size: int, devices: int) -> np.ndarray:
    """Spread clients over devices that can each train any client, without looking at their sizes.

    Clients are sorted by size. The D largest go to the devices in turn, the next D in the reverse order, and so on:
    loads are balanced, clients of a device that follow each other are of similar size, and no device gets more than
    ceil(M / D).

    Args:
      size: M.
      devices: D.

    Returns:
      [D, ceil(M / D)], int32: ranks of the clients of each device; M in free places, which are the last ones.

    Example:
      >>> from pfl_jax.data import places
      >>> places.spread(5, 2).tolist()
      [[0, 3, 4], [1, 2, 5]]
    """
    ranks = np.arange(-(-size // devices) * devices, dtype=np.int32).reshape(-1, devices)
    ranks[1::2] = ranks[1::2, ::-1]
    return np.minimum(ranks, size).T
