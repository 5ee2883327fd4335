"""Choice of the number of clients under one vmap, and the steps wasted when clients differ in size."""

import numpy as np

from pfl_jax.primitives.local_sgd import num_steps

MAX_WASTE = 0.1
"""Share of wasted gradient steps up to which `choose_chunk` takes a larger chunk."""


def wasted_step_share(
    counts: np.ndarray,
    *,
    batch_size: int,
    chunk: int | None,
    devices: int = 1,
    owners: np.ndarray | None = None,
    drop_last: bool = False,
) -> float:
    """Share of a round's gradient steps spent on clients that have already finished.

        1 - sum_i s_i / sum_i s_{longest client of i's chunk},   s_i of `pfl_jax.primitives.local_sgd.num_steps`

    Clients under one vmap run as long as the largest of them, and what the others compute meanwhile is thrown away.
    The schedule is that of `pfl_jax.engine.mapping.map_clients`: largest clients first, dealt to the devices in turn,
    and taken in chunks there; where the devices do not divide the cohort, the largest client fills it up and is itself
    no waste, since its copies run where a device would stand idle, but a chunk with a copy lasts as long as it does.

    Args:
      counts: training examples [M] of the cohort's clients, in any order.
      batch_size: examples of a step.
      chunk: clients under one vmap on each device; None is all at once.
      devices: D that share the clients.
      owners: [M], the device of each client where that is fixed (`pfl_jax.engine.sharding.map_owned`); a device
        takes its own ones largest first, `chunk` at a time, by default ceil(M / D).
      drop_last: whether incomplete last batches are left out.

    Returns:
      In [0, 1); 0 for one client after another.

    Example:
      >>> import numpy as np
      >>> from pfl_jax.engine import chunking
      >>> chunking.wasted_step_share(np.array([100, 50]), batch_size=10, chunk=2)  # (10 + 5) of 2 * 10 steps
      0.25
    """
    each = num_steps(np.asarray(counts, np.int64), batch_size, drop_last=drop_last)
    if owners is not None:
        width = -(-len(counts) // devices) if chunk is None else chunk
        needed = executed = 0
        for device in range(devices):
            own = np.sort(each[owners == device])[::-1]
            needed += int(own.sum())
            executed += sum(int(own[start]) * len(own[start : start + width]) for start in range(0, len(own), width))
        return 1 - needed / executed
    steps = np.sort(each)[::-1]
    per_device = -(-steps.size // devices)
    real = np.arange(per_device * devices) < steps.size
    chunks = np.arange(per_device) // (per_device if chunk is None else chunk)
    dealt = np.where(real, np.resize(steps, real.size), steps[0]).reshape(per_device, devices)
    # Row p of `dealt` holds the p-th client of each device; chunks are runs of rows.
    longest = np.maximum.reduceat(dealt, np.flatnonzero(np.diff(chunks, prepend=-1)), axis=0)[chunks]
    executed = int(longest.reshape(-1)[real].sum())
    return 1 - int(steps.sum()) / executed


def choose_chunk(
    counts: np.ndarray,
    *,
    batch_size: int,
    devices: int,
    backend: str,
    convolutional: bool = True,
    drop_last: bool = False,
) -> int:
    """Number of clients under one vmap for `--chunk auto`.

    Convolutional networks on a CPU: one client after another, since convolutions with a kernel for each client run in
    a loop there anyway, and no step is wasted. Everything else: as many clients at once as there are on a device,
    unless that wastes a tenth of the gradient steps or more: then the largest chunk that does not.

    Args:
      counts: training examples [M] of a typical cohort, see `typical_cohort`.
      batch_size: examples of a step.
      devices: that share the clients.
      backend: as `jax.default_backend()` calls it.
      convolutional: whether the model has convolutions.
      drop_last: whether incomplete last batches are left out.
    """
    if backend == "cpu" and convolutional:
        return 1
    everyone = -(-len(counts) // devices)

    def waste(chunk: int) -> float:
        return wasted_step_share(counts, batch_size=batch_size, chunk=chunk, devices=devices, drop_last=drop_last)

    return next((chunk for chunk in range(everyone, 1, -1) if waste(chunk) < MAX_WASTE), 1)


def typical_cohort(counts: np.ndarray, size: int) -> np.ndarray:
    """Training examples [M] of an average cohort: clients evenly spaced in the order of size.

    Args:
      counts: training examples [N] of all clients.
      size: M, at most N.
    """
    places = (np.arange(size) + 0.5) * len(counts) / size
    return np.sort(counts)[places.astype(np.int64)]
