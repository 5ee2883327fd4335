"""Choice of the number of clients under one vmap, and what is lost when clients differ in size."""

from dataclasses import replace

import jax
import numpy as np

from pfl_jax.base import Method, MethodSchedule, at_round
from pfl_jax.engine.cohort import Settings
from pfl_jax.engine.mapping import assign_on_host
from pfl_jax.networks.models import is_convolutional
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

    Clients under one vmap run as many steps as the largest of them; the surplus steps of the others are discarded.
    Clients, sorted by size, are spread over the devices as by `pfl_jax.engine.mapping.map_and_sum`, and each device
    takes its clients in chunks. If the number of devices does not divide the cohort, copies of the largest client fill
    the last places. A copy itself does not count as waste, because its device would be idle otherwise, but the chunk
    that contains it runs as many steps as the copy.

    Args:
      counts: training examples [M] of the cohort's clients, in any order.
      batch_size: examples of a mini-batch.
      chunk: clients under one vmap on each device; None for all at once.
      devices: number D of devices that share the clients.
      owners: [M], the device of each client if that is fixed (`pfl_jax.engine.sharding.map_owned`). A device then takes
        its own clients largest first, `chunk` at a time, or ceil(M / D) for chunk None.
      drop_last: whether incomplete last batches are left out.

    Returns:
      Share in [0, 1); 0 if clients run one after another.

    Example:
      >>> import numpy as np
      >>> from pfl_jax.engine import chunking
      >>> chunking.wasted_step_share(np.array([100, 50]), batch_size=10, chunk=2)  # (10 + 5) of 2 * 10 steps
      0.25
    """
    chunks = _chunks(counts, batch_size, chunk, devices, owners, drop_last)
    needed = sum(int(steps[is_real].sum()) for own in chunks for steps, is_real in own)
    executed = sum(int(steps.max()) * int(is_real.sum()) for own in chunks for steps, is_real in own)
    return 1 - needed / executed


def idle_device_share(
    counts: np.ndarray,
    *,
    batch_size: int,
    chunk: int | None,
    devices: int = 1,
    owners: np.ndarray | None = None,
    drop_last: bool = False,
) -> float:
    """Share of the devices' time in which they wait for the device that trains longest.

        1 - sum_d t_d / (D max_d t_d),   t_d the steps that device d runs, those of finished clients included

    Args:
      counts, batch_size, chunk, devices, owners, drop_last: see `wasted_step_share`.

    Returns:
      Share in [0, 1); 0 on one device.

    Example:
      >>> import numpy as np
      >>> from pfl_jax.engine import chunking
      >>> share = chunking.idle_device_share(np.array([40, 20, 10, 10]), batch_size=10, chunk=1, devices=2)
      >>> print(f"{share:.2f}")  # the devices run 5 and 3 steps
      0.20
    """
    chunks = _chunks(counts, batch_size, chunk, devices, owners, drop_last)
    busy = np.array([sum(int(steps.max()) * len(steps) for steps, _ in own) for own in chunks])
    return 1 - float(busy.mean()) / int(busy.max())


def _chunks(
    counts: np.ndarray,
    batch_size: int,
    chunk: int | None,
    devices: int,
    owners: np.ndarray | None,
    drop_last: bool,
) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """Chunks that each device takes one after another: (steps [c] of its clients, whether they are no copies [c])."""
    counts = np.sort(np.asarray(counts, np.int64))[::-1] if owners is None else np.asarray(counts, np.int64)
    steps, size = num_steps(counts, batch_size, drop_last=drop_last), len(counts)
    if owners is not None:
        order = np.argsort(-steps, stable=True)
        places = [order[owners[order] == device] for device in range(devices)]
    elif chunk == 1:
        places = [own[own < size] for own in assign_on_host(counts, devices)]
    else:
        places = list(np.arange(-(-size // devices) * devices).reshape(-1, devices).T)
    width = -(-size // devices) if chunk is None else chunk
    return [
        [
            (steps[np.where(part < size, part, 0)], part < size)
            for part in (own[start : start + width] for start in range(0, len(own), width))
        ]
        for own in places
    ]


def resolved(
    settings: Settings,
    method: Method | MethodSchedule,
    counts: np.ndarray,
    *,
    devices: int = 1,
    backend: str | None = None,
) -> Settings:
    """Settings with a chunk in place of "auto", as `choose_chunk` has it for a typical cohort.

    Args:
      settings: settings of a run.
      method: its method. Where it does not say how clients train (`Method.work`), each example counts as a step, and
        the model as one with convolutions.
      counts: training examples [N] of all clients, or [R, N] of those of R runs.
      devices: number of devices that share the clients.
      backend: name of the backend; None for JAX's default.

    Example:
      >>> import numpy as np
      >>> from pfl_jax import LocalSGD, Settings, methods, models
      >>> from pfl_jax.engine import chunking
      >>> method = methods.fedavg(models.fedpac_cnn((28, 28, 1), 10), LocalSGD(batch_size=50))
      >>> sizes = np.full(20, 600)
      >>> [chunking.resolved(Settings(10), method, sizes, backend=name).chunk for name in ("cpu", "gpu")]
      [1, 20]
    """
    if settings.chunk != "auto":
        return settings
    work, counts = at_round(method, 0).work, np.atleast_2d(counts)
    size = settings.cohort_size(counts.shape[1], 0)
    chunks = [
        choose_chunk(
            typical_cohort(row, size),
            batch_size=1 if work is None else work.batch_size,
            devices=devices,
            backend=backend or jax.default_backend(),
            convolutional=work is None or is_convolutional(work.model),
            drop_last=work is not None and work.drop_last,
        )
        for row in np.unique(np.sort(counts, axis=1), axis=0)
    ]
    return replace(settings, chunk=min(chunks))


def runs_at_once(method: Method | MethodSchedule, backend: str | None = None) -> int | None:
    """Runs of a sweep under one vmap for chunk "auto": 1 for convolutions on a CPU, otherwise None, all of a device.

    Args:
      method: the method of one run.
      backend: name of the backend; None for JAX's default.
    """
    work = at_round(method, 0).work
    one_by_one = (backend or jax.default_backend()) == "cpu" and (work is None or is_convolutional(work.model))
    return 1 if one_by_one else None


def choose_chunk(
    counts: np.ndarray,
    *,
    batch_size: int,
    devices: int,
    backend: str,
    convolutional: bool = True,
    drop_last: bool = False,
) -> int:
    """Number of clients under one vmap for chunk "auto".

    For convolutional networks on a CPU it is 1: convolutions with a separate kernel for each client run in a loop there
    anyway, and chunk 1 wastes no step. Otherwise it is the largest chunk that wastes less than a tenth of the gradient
    steps, at most all clients of a device.

    Args:
      counts: training examples [M] of a typical cohort, see `typical_cohort`.
      batch_size: examples of a mini-batch.
      devices: number of devices that share the clients.
      backend: name of the backend, as from `jax.default_backend()`.
      convolutional: whether the model has convolutions.
      drop_last: whether incomplete last batches are left out.
    """
    if backend == "cpu" and convolutional:
        return 1
    steps = num_steps(np.sort(np.asarray(counts, np.int64))[::-1], batch_size, drop_last=drop_last)
    copies = -len(steps) % devices
    # As `_chunks` has them: device d takes places [:, d], and copies of the largest client fill the last row.
    places = np.append(steps, np.full(copies, steps[0])).reshape(-1, devices)
    real_in_last_row = np.arange(devices) < devices - copies

    def waste(chunk: int) -> float:
        longest = places[::chunk].copy()
        longest[-1] = np.maximum(longest[-1], places[-1])
        last = len(places) - (len(longest) - 1) * chunk - ~real_in_last_row
        return 1 - steps.sum() / (chunk * longest[:-1].sum() + longest[-1] @ last)

    return next((chunk for chunk in range(len(places), 1, -1) if waste(chunk) < MAX_WASTE), 1)


def typical_cohort(counts: np.ndarray, size: int) -> np.ndarray:
    """Training examples [M] of a typical cohort: clients at evenly spaced quantiles of the client sizes.

    Args:
      counts: training examples [N] of all clients.
      size: M, at most N.
    """
    positions = (np.arange(size) + 0.5) * len(counts) / size
    return np.sort(counts)[positions.astype(np.int64)]
