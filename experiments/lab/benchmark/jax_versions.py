"""Local training of FedPAC's network with each form of its first layer, by version of JAX; a minute for each.

Every Python given has a version of JAX with what the library needs:

    python -m experiments.lab.benchmark.jax_versions --pythons old/bin/python new/bin/python --out FILE.json
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from experiments.cli.exit_codes import leave
from experiments.lab.benchmark import command, measure
from experiments.lab.benchmark.records import Row, Section
from pfl_jax.errors import InvalidInput

EXAMPLES, BATCH, REPETITIONS = 600, 50, 15

MEASURE = f"""
import json, statistics, time
import jax, jax.numpy as jnp
from pfl_jax import ClientData, LocalTraining, models
from pfl_jax.networks import convolution
from pfl_jax.primitives.losses import supervised_loss

model = models.fedpac_cnn((28, 28, 1), 10)
training, loss = LocalTraining(lr=0.01, batch_size={BATCH}), supervised_loss(model)
x, y = jax.random.uniform(jax.random.key(0), ({EXAMPLES}, 28, 28, 1)), jnp.arange({EXAMPLES}) % 10
data, params = ClientData(x, y, jnp.ones({EXAMPLES}, bool)), model.init(jax.random.key(1))
chosen, programs = convolution._BANDS, {{}}
for bands in (False, True):
    jax.clear_caches()
    convolution._BANDS = bands
    fit = jax.jit(lambda params: training.fit(jax.random.key(2), params, data, loss))
    programs[bands] = fit.lower(params).compile()
    jax.block_until_ready(programs[bands](params))
times = {{bands: [] for bands in programs}}
for _ in range({REPETITIONS}):
    for bands, program in programs.items():
        start = time.perf_counter()
        jax.block_until_ready(program(params))
        times[bands].append(1e3 * (time.perf_counter() - start))
found = {{bands: statistics.median(of) for bands, of in times.items()}}
print(json.dumps({{"jax": jax.__version__, "chosen": "bands" if chosen else "pairs",
                  "pairs, ms": found[False], "bands, ms": found[True]}}))
"""


@dataclass(frozen=True, kw_only=True)
class Options(command.Options):
    """Command line of the comparison."""

    pythons: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="PYTHON...")] = (Path(sys.executable),)
    """Interpreters to compare."""


def measured(python: Path) -> Row:
    """Row of one interpreter, on one core."""
    environment = os.environ | {
        "PYTHONPATH": str(measure.ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
    }
    words = ["taskset", "-c", str(max(os.sched_getaffinity(0))), str(python), "-c", MEASURE]
    ended = subprocess.run(words, capture_output=True, text=True, env=environment)
    if ended.returncode:
        line = (ended.stderr.strip().splitlines() or ["it wrote nothing"])[-1]
        raise InvalidInput(f"{python} ended with exit code {ended.returncode}: {line}")
    return json.loads(ended.stdout.strip().splitlines()[-1])


def compare(options: Options, notify: command.Notify) -> tuple[dict[str, Section], dict[str, Any]]:
    """Times by version, and each relative to the best of the first."""
    rows: list[Row] = []
    for python in options.pythons:
        notify(str(python))
        row = measured(python)
        best = min((rows or [row])[0][name] for name in ("pairs, ms", "bands, ms"))
        rows.append(row | {"chosen / best of the first": row[f"{row['chosen']}, ms"] / best})
    note = f"five epochs of {EXAMPLES} examples in batches of {BATCH}, one core; medians of {REPETITIONS} in turn"
    return {"jax_versions": Section("Versions of JAX", rows, note)}, {}


def main(words: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
      words: after the module's name; by default those of this process.

    Returns:
      The exit code, see `exit_codes.exit_code`.
    """
    return command.command(Options, "experiments.lab.benchmark.jax_versions", __doc__, words, compare)


if __name__ == "__main__":
    leave(main())
