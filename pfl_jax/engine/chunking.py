"""Choice of the number of clients under one vmap, and the steps that it wastes when clients differ in size."""

from dataclasses import replace

import numpy as np

from pfl_jax.backends import choices
from pfl_jax.base import Method
from pfl_jax.data.federated import spread
from pfl_jax.engine.cohort import Settings
from pfl_jax.networks.models import is_convolutional
from pfl_jax.primitives.mini_batches import num_steps
from pfl_jax.schedules import MethodSchedule, at_round, mixture

MAX_WASTE = 0.1
"""Share of wasted gradient steps from which on `resolved` takes a smaller chunk."""


def wasted_share(
    counts: np.ndarray,
    *,
    batch_size: int,
    chunk: int | None,
    devices: int = 1,
    drop_last: bool = False,
) -> float:
    """Share in [0, 1) of a round's gradient steps that is spent on clients that have already finished.

    Clients under one vmap run as many steps as the largest of them; the surplus steps of the others are discarded:
    1 - sum_i s_i / sum_i s_{longest client of i's chunk}, with s_i of `pfl_jax.primitives.mini_batches.num_steps`.
    Clients, sorted by size, are spread over the devices by `pfl_jax.data.federated.spread`, and each device takes its
    clients in chunks. Copies that fill a device's last chunk do not count.

    Args:
      counts: training examples [M] of the cohort's clients, in any order.
      batch_size, drop_last: see `LocalTraining`.
      chunk: clients under one vmap on each device; None for all at once.
      devices: number D of devices that share the clients.

    Example:
      >>> import numpy as np
      >>> from pfl_jax.engine.chunking import wasted_share
      >>> wasted_share(np.array([100, 50]), batch_size=10, chunk=2)  # (10 + 5) of 2 * 10 steps
      0.25
    """
    counts = np.sort(np.asarray(counts, np.int64))[::-1]
    # [D, W], with 0 in free places.
    steps = np.append(num_steps(counts, batch_size, drop_last=drop_last), 0)[spread(len(counts), devices)]
    width = -(-len(counts) // devices) if chunk is None else chunk
    starts = np.arange(0, steps.shape[1], width)
    # In a chunk each client runs as many steps as the largest.
    executed = steps[:, starts] * np.clip(np.sum(steps > 0, axis=1)[:, None] - starts, 0, width)
    return 1 - float(steps.sum() / executed.sum())


def resolved(
    settings: Settings,
    method: Method | MethodSchedule,
    counts: np.ndarray,
    *,
    devices: int = 1,
    backend: str | None = None,
) -> Settings:
    """Settings with a number in place of chunk "auto", chosen for a typical cohort.

    A device's clients are divided into equal chunks, the fewest that waste less than a tenth of the gradient steps.

    Args:
      settings: settings of a run.
      method: method of the run. If it does not say how clients train (`Method.work`), each example counts as a step,
        and the model is treated as one with convolutions.
      counts: training examples [N] of all clients, or [R, N] for R runs.
      devices: number of devices that share the clients.
      backend: name of the backend; None for JAX's default.

    Example:
      >>> import numpy as np
      >>> from pfl_jax import LocalTraining, Settings, methods, models
      >>> from pfl_jax.engine import chunking
      >>> method = methods.fedavg(models.fedpac_cnn((28, 28, 1), 10), LocalTraining(batch_size=50))
      >>> sizes = np.full(20, 600)
      >>> [chunking.resolved(Settings(10), method, sizes, backend=name).chunk for name in ("cpu", "gpu")]
      [1, 20]
    """
    if settings.chunk != "auto":
        return settings
    if (mixed := mixture(method)) is not None:
        own = [counts[..., mixed.members(index, counts.shape[-1])] for index in range(len(mixed.methods))]
        each = zip(mixed.methods, own, strict=True)
        chunks = [resolved(settings, one, sizes, devices=devices, backend=backend).chunk for one, sizes in each]
        return replace(settings, chunk=tuple(chunks))
    work, counts = at_round(method, 0).work, np.unique(np.sort(np.atleast_2d(counts), axis=1), axis=0)
    cohorts = typical_cohort(counts, settings.cohort_size(counts.shape[1], 0))
    if work is not None and work.same_steps:
        # All clients take the same steps, whatever their sizes.
        cohorts = np.minimum(cohorts, 1)
    batch_size, drop_last = (1, False) if work is None else (work.batch_size, work.drop_last)
    most, clients = most_clients(method, backend), -(-cohorts.shape[1] // devices)
    # Equal chunks of a device's clients, the largest first.
    equal = sorted({-(-clients // number) for number in range(1, clients + 1)}, reverse=True)
    equal = [chunk for chunk in equal if most is None or chunk <= most]

    def wasted(counts: np.ndarray, chunk: int) -> float:
        return wasted_share(counts, batch_size=batch_size, chunk=chunk, devices=devices, drop_last=drop_last)

    chunks = [next((chunk for chunk in equal if wasted(cohort, chunk) < MAX_WASTE), 1) for cohort in cohorts]
    return replace(settings, chunk=min(chunks))


def most_clients(method: Method | MethodSchedule, backend: str | None = None) -> int | None:
    """Largest number of clients under one vmap for chunk "auto", from `pfl_jax.backends`; None for no limit.

    It is 1 for convolutions on a CPU: a CPU computes convolutions with separate kernels for each client in a loop
    anyway, and training one client after another wastes no step.

    Args:
      method: method of the clients.
      backend: name of the backend; None for JAX's default.
    """
    mixed, most = mixture(method), choices(backend).chunk
    works = [one.work for one in ([at_round(method, 0)] if mixed is None else mixed.methods)]
    return most if most and any(work is None or is_convolutional(work.model) for work in works) else None


def typical_cohort(counts: np.ndarray, size: int) -> np.ndarray:
    """Training examples [..., M] of a cohort of `size` M clients at evenly spaced quantiles of `counts` [..., N]."""
    positions = (np.arange(size) + 0.5) * counts.shape[-1] / size
    return np.sort(counts)[..., positions.astype(np.int64)]
