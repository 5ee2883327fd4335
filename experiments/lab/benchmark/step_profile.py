"""Profile of local training: the time of each operation of the compiled program, by layer of the network."""

import dataclasses
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax

from experiments.lab.benchmark import measure, workload
from experiments.lab.benchmark.jax_rounds import compiled_training
from experiments.lab.benchmark.records import Row, Section
from experiments.lab.benchmark.workload import Scale, Setup
from pfl_jax import simulate

EPOCHS, REPETITIONS = 2, 5
"""Epochs of the one client that is profiled, and how often it trains."""

FORWARD, GRADIENTS, TRANSPOSITIONS, REST = "forward product", "products of gradients", "transpositions", "other"
"""Kinds of operations."""

_OPERATION = re.compile(r"\s*(?:ROOT )?%(\S+) = \S+ ([\w-]+)\(.*")
_PATH = re.compile(r'op_name="([^"]*)"')
_CONTROL = ("while", "conditional", "call")
_PRODUCTS = ("conv_general_dilated", "dot_general")


class Part(NamedTuple):
    """Part of a program: a layer of the network ("" outside of all of them), and a kind of operations."""

    layer: str
    kind: str


def profile(setup: Setup) -> Section:
    """Milliseconds of a step of local training, by layer and kind of operation, in a process with one core."""
    setup.notify("a profile of local training, in a process of its own")
    # With more devices XLA has more threads, and an operation that several share reports a part of its time.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=1"
    found = measure.in_process("step_profile", {"scale": dataclasses.asdict(setup.scale)}, XLA_FLAGS=flags)
    note = (
        f"one client, one core, batches of {setup.scale.batch_size}; a step takes {found['step, ms']:.3g} ms, and "
        f"{found['unprofiled, ms']:.3g} ms without the profiler; the peak of square matrix products on one core is "
        f"{found['peak'] / 1e9:.0f} GFLOP/s"
    )
    return Section("A step of local training", found["rows"], note)


def step_profile(scale: Scale) -> Row:
    """Rows of the section, milliseconds of a step with the profiler and without, and the core's peak."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    peak = measure.matmul_peak(scale.matmul, simulate.client_mesh())["one_device"]
    layers = workload.layer_operations()
    data = workload.federation(scale.clients, scale.examples)
    program, arguments = compiled_training(data, scale, clients=1, epochs=EPOCHS, chunk=1, mesh=None)

    def train() -> None:
        for _ in range(REPETITIONS):
            jax.block_until_ready(program(*arguments))

    train()
    plain = measure.seconds(train)
    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.host_tracer_level = 3  # From here on, events of single operations.
        with jax.profiler.trace(folder, profiler_options=options):
            whole = measure.seconds(train)
        seconds = part_seconds(
            Path(folder), program_parts(program.as_text() or "", {"Dense": "head"} | {name: name for name in layers})
        )
    steps = REPETITIONS * EPOCHS * -(-scale.examples // scale.batch_size)
    rows = []
    for part in sorted(seconds, key=lambda part: (part.layer == "", part)):
        row: Row = {"layer": part.layer or "outside", "operations": part.kind}
        row |= {"ms": 1e3 * seconds[part] / steps, "share %": 100 * seconds[part] / whole}
        products = _products(part, first=next(iter(layers)))
        if products:
            rate = products * layers[part.layer] * scale.batch_size * steps / seconds[part]
            row["of peak %"] = 100 * rate / peak
        rows.append(row)
    between = whole - sum(seconds.values())
    rows.append({"layer": "between operations", "ms": 1e3 * between / steps, "share %": 100 * between / whole})
    return {"rows": rows, "step, ms": 1e3 * whole / steps, "unprofiled, ms": 1e3 * plain / steps, "peak": peak}


def _products(part: Part, first: str) -> int:
    """Products of the size of the layer's forward product; the first layer needs no gradient of its input."""
    if not part.layer:
        return 0
    return {FORWARD: 1, GRADIENTS: 1 if part.layer == first else 2}.get(part.kind, 0)


def program_parts(text: str, scopes: dict[str, str]) -> dict[str, Part]:
    """Part of every operation of a compiled program by its name, but for loops and branches, whose operations count.

    Args:
      text: the program in HLO.
      scopes: layers of the network by the name of their module in the paths of operations.
    """
    parts = {}
    for line in text.splitlines():
        found = _OPERATION.match(line)
        if found is None or found[2] in _CONTROL:
            continue
        path = _PATH.search(line)
        names = path[1].split("/") if path else []
        layer = next((scopes[module] for name in names if (module := name.partition(".")[0]) in scopes), "")
        parts[found[1]] = Part(layer, _kind(names))
    return parts


def _kind(names: list[str]) -> str:
    backward = any(name.startswith("transpose(") for name in names)
    # The transposed product of a dense layer's kernel gradient keeps the name of the transposition.
    dense = any(name.endswith(".multiply") for name in names)
    last = names[-1] if names else ""
    if last in _PRODUCTS or (last == "transpose" and dense):
        return GRADIENTS if backward else FORWARD
    return TRANSPOSITIONS if last == "transpose" else REST


def part_seconds(folder: Path, parts: dict[str, Part]) -> dict[Part, float]:
    """Seconds of each part in the profile that JAX has written to a folder."""
    seconds: dict[Part, float] = defaultdict(float)
    for name, duration in _events(folder):
        if name in parts:
            seconds[parts[name]] += duration
    return seconds


def _events(folder: Path) -> Iterator[tuple[str, float]]:
    """Names and seconds of all events of a profile."""
    for file in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            for line in plane.lines:
                yield from ((event.name, 1e-9 * event.duration_ns) for event in line.events)
