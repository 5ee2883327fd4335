"""What needs a process of its own: `python -m experiments.benchmark.children KIND JSON` prints one line of JSON."""

import dataclasses
import json
import sys
from typing import Any

import jax

from experiments import run
from experiments.benchmark import measure, workload
from experiments.benchmark.jax_rounds import Rounds, local_training
from experiments.benchmark.workload import Scale
from pfl_jax import models, simulate
from pfl_jax.methods import METHODS


def growth(scale: Scale, clients: int, participation: float, repetitions: int) -> dict[str, Any]:
    """Time and memory of FedPAC's rounds over a federation of this many clients, and of its cohort trained alone.

    Args:
      scale: `growth_examples` and rates.
      clients: N.
      participation: share of the clients in a cohort.
      repetitions: interleaved.

    Returns:
      clients, cohort, round_seconds, alone_seconds, evaluation_seconds, peak_bytes (with the evaluation).
    """
    mesh = simulate.client_mesh()
    data = workload.federation(clients, scale.growth_examples)
    chunk = 1 if jax.default_backend() == "cpu" else None
    rounds = Rounds(workload.method("fedpac", scale), data, participation=participation, chunk=chunk, mesh=mesh)
    rounds.round()
    evaluation = measure.seconds(rounds.evaluate)
    peak = measure.peak_memory()
    alone = local_training(data, scale, clients=rounds.cohort_size, epochs=scale.epochs, chunk=chunk, mesh=mesh)
    alone()
    times = measure.interleaved(repetitions, {"round": rounds.round, "alone": alone})
    return {
        "clients": clients,
        "cohort": rounds.cohort_size,
        "round_seconds": measure.median(times["round"]),
        "alone_seconds": measure.median(times["alone"]),
        "evaluation_seconds": evaluation,
        "peak_bytes": peak,
    }


def endurance(scale: Scale) -> dict[str, Any]:
    """Memory held after an early and after the last of many small rounds, through `simulate.run`.

    Args:
      scale: `endurance` has the last round and the early one.

    Returns:
      rounds and resident_bytes of both; null where the system does not tell.
    """
    last, early = scale.endurance
    data = workload.federation(10, 20)
    model = models.mlp(workload.dataset().input_shape, workload.dataset().num_classes)
    method = METHODS["fedpac"](model, epochs=1, batch_size=10)
    settings = simulate.Settings(rounds=last, participation=0.5, eval_every=10)
    held = {
        result.round: measure.resident_memory()
        for result in simulate.run(method, data, settings, jax.random.key(0), mesh=simulate.client_mesh())
    }
    return {"rounds": [early, last], "resident_bytes": [held[early], held[last]]}


def start(words: list[str]) -> dict[str, Any]:
    """Runs an experiment and counts its programs.

    Args:
      words: dataset and options.

    Returns:
      programs: that were needed; compiled: those that the persistent cache did not have.
    """
    from experiments.cli import main

    counts = {"programs": 0, "cached": 0}

    def count(event: str, **_: Any) -> None:
        counts["cached"] += event == "/jax/compilation_cache/cache_hits"

    def count_timed(event: str, duration_secs: float, **kwargs: str | int) -> None:
        # Reported for every program that XLA is asked for, whether it compiles it or finds it in the cache.
        counts["programs"] += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_listener(count)
    jax.monitoring.register_event_duration_secs_listener(count_timed)
    code = main(words[0], words[1:])
    if code:
        raise SystemExit(code)
    return {"programs": counts["programs"], "compiled": counts["programs"] - counts["cached"]}


def main(kind: str, request: dict[str, Any]) -> dict[str, Any]:
    """One child's work.

    Args:
      kind: growth, endurance or start.
      request: "scale" as a dictionary, and the other arguments.
    """
    if kind == "start":
        return start(request["words"])
    run.prepare_jax()
    names = {field.name for field in dataclasses.fields(Scale)}
    scale = Scale(**{name: value for name, value in request.pop("scale").items() if name in names})
    return {"growth": growth, "endurance": endurance}[kind](scale, **request)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], json.loads(sys.argv[2]))))
