"""Child processes of the benchmark: `python -m experiments.benchmark.children KIND JSON` prints one line of JSON."""

import dataclasses
import json
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp

import pfl_jax.engine.sweep
from experiments.benchmark import measure, workload
from experiments.benchmark.jax_rounds import Rounds, local_training
from experiments.benchmark.workload import Scale
from experiments.runtime import jax_config
from pfl_jax import models, simulate
from pfl_jax.methods import make_method
from pfl_jax.primitives.tree import byte_count


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


def memory_growth(scale: Scale) -> dict[str, Any]:
    """Memory held after an early and after the last of many small rounds, through `simulate.run`.

    Args:
      scale: `memory_growth` has the last round and the early one.

    Returns:
      rounds and resident_bytes of both; null where the system does not report it.
    """
    last, early = scale.memory_growth
    data = workload.federation(10, 20)
    model = models.mlp(workload.dataset().input_shape, workload.dataset().num_classes)
    method = make_method("fedpac", model, epochs=1, batch_size=10)
    settings = simulate.Settings(rounds=last, participation=0.5, eval_every=10)
    held = {
        result.round: measure.resident_memory()
        for result in simulate.run(method, data, settings, jax.random.key(0), mesh=simulate.client_mesh())
    }
    return {"rounds": [early, last], "resident_bytes": [held[early], held[last]]}


def many_clients(scale: Scale, method: str) -> dict[str, Any]:
    """Many clients with states of their own, of which few take part in a round; the states are on the host.

    Args:
      scale: `many_clients`, `growth_examples` and rates.
      method: a key of METHODS.

    Returns:
      clients, cohort, round_seconds (median, without the first), start_seconds (initial states and the first round,
      compiled), evaluation_seconds, peak_bytes, state_bytes, and accuracies in percent: of the cohorts' models after
      their training in the first and in the last rounds, and of what everyone deploys at the end.
    """
    clients, participation, rounds = scale.many_clients
    data = workload.federation(clients, scale.growth_examples)
    settings = simulate.Settings(rounds=rounds, participation=participation, eval_every=rounds)
    settings = dataclasses.replace(settings, chunk=1 if jax.default_backend() == "cpu" else None)
    seconds, trained, received, state_bytes = [], [], float("nan"), 0
    began = time.perf_counter()
    for result in simulate.run(
        workload.method(method, scale), data, settings, jax.random.key(0), mesh=simulate.client_mesh(), state_on="host"
    ):
        seconds.append(time.perf_counter() - began)
        trained.append(100 * float(result.trained.accuracy[result.cohort].mean()))
        if result.received is not None:
            received = 100 * float(result.received.accuracy.mean())
            state_bytes = byte_count(result.state.clients)
        began = time.perf_counter()
    usual = measure.median(seconds[1:-1])
    return {
        "method": method,
        "clients": clients,
        "cohort": settings.cohort_size(clients, 0),
        "rounds": rounds,
        "start_seconds": seconds[0],
        "round_seconds": usual,
        "evaluation_seconds": seconds[-1] - usual,
        "peak_bytes": measure.peak_memory(),
        "state_bytes": state_bytes,
        "trained_first": sum(trained[:3]) / 3,
        "trained_last": sum(trained[-3:]) / 3,
        "received": received,
    }


def sweep(scale: Scale, together: bool) -> dict[str, Any]:
    """FedPAC with several strengths of its alignment and several seeds: as one sweep, or one run after another.

    Args:
      scale: `sweep` and rates.
      together: whether the runs are a sweep.

    Returns:
      runs, seconds with compilation, and round_seconds of all runs' rounds without the first.
    """
    runs, clients, examples, rounds = scale.sweep
    data = workload.federation(clients, examples)
    settings = simulate.Settings(rounds=rounds, chunk=1 if jax.default_backend() == "cpu" else None)
    strengths, seeds = [0.1 * 2 ** (run // 2) for run in range(runs)], [run % 2 for run in range(runs)]
    rates = {"lr": scale.lr, "momentum": scale.momentum, "weight_decay": scale.weight_decay, "head_lr": scale.head_lr}

    def make(lam):
        return make_method("fedpac", workload.network(), lam=lam, batch_size=scale.batch_size, epochs=1, **rates)

    mesh = simulate.client_mesh()
    began, later = time.perf_counter(), 0.0
    if together:
        keys = jnp.stack([jax.random.key(seed) for seed in seeds])
        values = {"lam": jnp.asarray(strengths)}
        results = list(pfl_jax.engine.sweep.run(make, data, settings, keys, values, chunk=settings.chunk, mesh=mesh))
        later = sum(result.seconds for result in results[1:])
    else:
        for lam, seed in zip(strengths, seeds, strict=True):
            results = list(simulate.run(make(lam), data, settings, jax.random.key(seed), mesh=mesh))
            later += sum(result.seconds for result in results[1:])
    return {"runs": runs, "seconds": time.perf_counter() - began, "round_seconds": later}


def start(words: list[str]) -> dict[str, Any]:
    """Run an experiment and count its programs.

    Args:
      words: dataset and options.

    Returns:
      programs: that were needed; compiled: those that the persistent cache did not have.
    """
    from experiments.commands.main import main

    counts = {"programs": 0, "cached": 0}

    def count(event: str, **_: Any) -> None:
        counts["cached"] += event == "/jax/compilation_cache/cache_hits"

    def count_timed(event: str, duration_secs: float, **kwargs: str | int) -> None:
        # Reported for every program, compiled by XLA or found in the cache.
        counts["programs"] += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_listener(count)
    jax.monitoring.register_event_duration_secs_listener(count_timed)
    code = main(words[0], words[1:])
    if code:
        raise SystemExit(code)
    return {"programs": counts["programs"], "compiled": counts["programs"] - counts["cached"]}


def main(kind: str, request: dict[str, Any]) -> dict[str, Any]:
    """Run one child process.

    Args:
      kind: growth, memory_growth, many_clients, sweep or start.
      request: "scale" as a dictionary, and the other arguments.
    """
    if kind == "start":
        return start(request["words"])
    # What is compiled again and again is a part of what sweeps save.
    jax_config.prepare_jax(compilation_cache=kind != "sweep")
    names = {field.name for field in dataclasses.fields(Scale)}
    scale = Scale(**{name: value for name, value in request.pop("scale").items() if name in names})
    return {"growth": growth, "memory_growth": memory_growth, "many_clients": many_clients, "sweep": sweep}[kind](
        scale, **request
    )


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], json.loads(sys.argv[2]))))
