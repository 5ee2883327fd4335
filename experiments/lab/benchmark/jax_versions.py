"""Local training of FedPAC's network with each form of its first layer, by version of JAX; minutes for each."""

import functools
import itertools
import os
import statistics
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from experiments.lab.benchmark import measure, workload
from experiments.lab.benchmark.child import in_process
from experiments.lab.benchmark.jax_rounds import local_training
from experiments.lab.benchmark.records import Row, Section
from experiments.lab.benchmark.workload import Scale, Setup
from pfl_jax.fast import forms

FORMS = {"pairs": False, "bands": True}
"""Form of the first layer -> value of `forms._BANDS`."""

ONE_DEVICE = "--xla_force_host_platform_device_count=1"
WITHOUT_YNNPACK = f"{ONE_DEVICE} --xla_cpu_experimental_ynn_fusion_type="
"""Flags of XLA."""


def jax_versions(setup: Setup) -> Section:
    """Times by version, on one core, and each relative to the best of the first."""
    scale, turns = setup.scale, setup.scale.repetitions[1]
    core = ("taskset", "-c", str(max(os.sched_getaffinity(0))))
    flags = [{"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags} for flags in (ONE_DEVICE, WITHOUT_YNNPACK)]
    contestants = list(itertools.product(setup.pythons, flags))
    measured: list[list[Row]] = []
    for turn in range(turns):
        setup.notify(f"turn {turn + 1} of {turns}")
        measured.append(
            [in_process(first_layer, scale, python=one, prefix=core, environment=env) for one, env in contestants]
        )
    medians = [_medians(rows) for rows in zip(*measured, strict=True)]
    rows: list[Row] = []
    for row, without in zip(medians[::2], medians[1::2], strict=True):
        best = min((rows or [row])[0][f"{form}, ms"] for form in FORMS)
        row["chosen / best of the first"] = row[f"{row['chosen']}, ms"] / best
        rows.append(row | {"chosen without YNNPACK, ms": without[f"{row['chosen']}, ms"]})
    note = (
        f"{scale.epochs} epochs of {scale.examples} examples in batches of {scale.batch_size}, one core; medians of "
        f"{turns} processes in turn, in each of {3 * scale.repetitions[0]} repetitions; forward and gradients: one "
        "convolution of the second layer"
    )
    return Section("Versions of JAX", rows, note)


def _medians(rows: Sequence[Row]) -> Row:
    """Row with the median of each number."""
    return {
        name: statistics.median(row[name] for row in rows) if name.endswith("ms") else rows[0][name] for name in rows[0]
    }


def first_layer(scale: Scale) -> Row:
    """Milliseconds of the local training of one client by form of the first layer, in this process."""
    data = workload.federation(1, scale.examples)
    chosen, programs = forms._BANDS, {}
    for form, bands in FORMS.items():
        jax.clear_caches()
        forms._BANDS = bands
        programs[form] = local_training(data, scale, clients=1, epochs=scale.epochs, chunk=1, mesh=None)
        programs[form]()
    times = measure.medians(3 * scale.repetitions[0], programs)
    row: dict[str, Any] = {"jax": jax.__version__, "chosen": next(form for form in FORMS if FORMS[form] == chosen)}
    row |= {f"{form}, ms": 1e3 * seconds for form, seconds in times.items()}
    return row | {f"{name}, ms": 1e3 * seconds / STEPS for name, seconds in _second_layer(scale).items()}


STEPS = 60
"""Repetitions of a map of the second layer in one program."""


def _second_layer(scale: Scale) -> dict[str, float]:
    """Seconds of STEPS repetitions of the three maps of the second layer, one after another, by map."""
    batch = scale.batch_size
    x, kernel, g = (jnp.ones(shape) for shape in ((batch, 12, 12, 16), (5, 5, 16, 32), (batch, 10, 10, 32)))
    form = forms.FORMS["direct"]
    maps = {"forward": (form.convolve, x, kernel)}
    maps |= {"input gradient": (form.input_gradient, g, kernel), "kernel gradient": (form.kernel_gradient, x, g)}

    @functools.partial(jax.jit, static_argnums=0)
    def repeated(fn, first, second):
        def step(carry, _):
            # Between barriers nothing is fused with the map, or leaves the loop.
            inputs = jax.lax.optimization_barrier(first + carry)
            return carry + 1e-9 * jax.lax.optimization_barrier(fn(1, inputs, second)).ravel()[0], None

        return jax.lax.scan(step, 0.0, length=STEPS)[0]

    programs = {name: functools.partial(repeated, *arguments) for name, arguments in maps.items()}
    return measure.medians(
        3 * scale.repetitions[0], {name: lambda run=run: run().block_until_ready() for name, run in programs.items()}
    )
