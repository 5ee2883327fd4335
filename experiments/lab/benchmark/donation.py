"""Cost of keeping the states of past rounds; some minutes on two cores.

Rounds on 20 clients of 600 examples in Fashion-MNIST's shape, by turns with and without `donate` of
`pfl_jax.engine.simulate.run`.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax

from experiments.cli.exit_codes import leave
from experiments.lab.benchmark import command, workload
from experiments.lab.benchmark.records import Row, Section
from pfl_jax import simulate
from pfl_jax.methods import make_method
from pfl_jax.primitives.tree import byte_count

ROUNDS = 10
_MB = 1e6


def donation(name: str) -> Row:
    """Megabytes of the state and of a round, kept and donated, and the median ratio of paired times.

    Args:
      name: of the method.
    """
    data = workload.federation(20, 600)
    method = make_method(name, workload.network(), batch_size=100, epochs=1)
    built = simulate.build(method, simulate.Settings(rounds=1))
    engines: dict[bool, Any] = {donate: built.jit(donate=donate) for donate in (False, True)}
    states = {donate: engine.init(data, jax.random.key(0)) for donate, engine in engines.items()}
    found: Row = {"method": name, "state MB": byte_count(states[True]._replace(key=())) / _MB}
    for donate, engine in engines.items():
        memory = engine.round.lower(data, states[donate], 20).compile().memory_analysis()
        results = memory.output_size_in_bytes - memory.alias_size_in_bytes
        total = memory.argument_size_in_bytes + memory.temp_size_in_bytes + results
        found["donated, MB" if donate else "kept, MB"] = total / _MB
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(ROUNDS + 1):
        for donate in (True, False) if number % 2 else (False, True):
            began = time.perf_counter()
            states[donate], outcome = engines[donate].round(data, states[donate], 20)
            jax.block_until_ready((states[donate].server, states[donate].clients, outcome.info))
            seconds[donate].append(time.perf_counter() - began)
    # The first rounds compile.
    ratios = [kept / donated for kept, donated in zip(seconds[False][1:], seconds[True][1:], strict=True)]
    return found | {"time, kept / donated": statistics.median(ratios), "least": min(ratios), "greatest": max(ratios)}


def compare(options: command.Options, notify: command.Notify) -> tuple[dict[str, Section], dict[str, Any]]:
    """Memory and time with and without donated states."""
    rows: list[Row] = []
    for name in ("fedpac", "ditto"):
        notify(name)
        rows.append(donation(name))
    note = f"20 clients of 600 examples in Fashion-MNIST's shape, one epoch, {ROUNDS} pairs of rounds"
    return {"donation": Section("Kept and donated states", rows, note)}, {}


def main(words: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
      words: after the module's name; by default those of this process.

    Returns:
      The exit code, see `exit_codes.exit_code`.
    """
    return command.command(command.Options, "experiments.lab.benchmark.donation", __doc__, words, compare)


if __name__ == "__main__":
    leave(main())
