"""Child processes of the benchmark: `python -m experiments.lab.benchmark.children KIND JSON` prints a line of JSON."""

import json
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp

import pfl_jax.engine.sweep
from experiments.host import jax_config
from experiments.lab.benchmark import measure, workload
from experiments.lab.benchmark.client_counts import many_states
from experiments.lab.benchmark.jax_rounds import Rounds, local_training
from experiments.lab.benchmark.large_cohorts import large_cohort
from experiments.lab.benchmark.records import Row
from experiments.lab.benchmark.workload import Scale
from pfl_jax import models, simulate
from pfl_jax.methods import make_method
from pfl_jax.primitives.tree import byte_count

_MIB = 2**20


def growth(scale: Scale, clients: int, participation: float) -> Row:
    """Time and memory of FedPAC's rounds over a federation of this many clients, and of its cohort trained alone."""
    mesh = simulate.client_mesh()
    data = workload.federation(clients, scale.growth_examples)
    rounds = Rounds(
        workload.method("fedpac", scale), data, participation=participation, chunk=workload.usual_chunks()[0], mesh=mesh
    )
    rounds.round()
    evaluation = measure.seconds(rounds.evaluate)
    peak = measure.peak_memory()
    alone = local_training(
        data, scale, clients=rounds.cohort_size, epochs=scale.epochs, chunk=workload.usual_chunks()[0], mesh=mesh
    )
    alone()
    times = measure.medians(scale.repetitions[1], {"round": rounds.round, "alone": alone})
    return {
        "clients": clients,
        "cohort": rounds.cohort_size,
        "s/round": times["round"],
        "trained alone, s": times["alone"],
        "ratio": times["round"] / times["alone"],
        "s/evaluation": evaluation,
        "peak MiB": peak / _MIB,
    }


def memory_growth(scale: Scale) -> Row:
    """Memory held after an early and after the last of many small rounds; None where the system does not report it."""
    last, early = scale.memory_growth
    data = workload.federation(10, 20)
    model = models.mlp(workload.dataset().input_shape, workload.dataset().num_classes)
    method = make_method("fedpac", model, epochs=1, batch_size=10)
    settings = simulate.Settings(rounds=last, participation=0.5, eval_every=10)
    held = {
        result.round: measure.resident_memory()
        for result in simulate.run(method, data, settings, jax.random.key(0), mesh=simulate.client_mesh(), donate=True)
    }
    found = {number: held[number] for number in (early, last)}
    return {str(number): None if size is None else size / _MIB for number, size in found.items()}


def runs(scale: Scale) -> Row:
    """Seconds of two short runs with one engine, with another key, in the same process."""
    data, method = workload.federation(10, 20), workload.method("fedpac", scale, epochs=1)
    settings = simulate.Settings(rounds=2, chunk=workload.usual_chunks()[0])
    mesh, found = simulate.client_mesh(), {}
    engine = simulate.build(method, settings, mesh).jit(mesh)
    for seed, name in enumerate(("first", "second")):
        began = time.perf_counter()
        list(simulate.run(method, data, settings, jax.random.key(seed), mesh=mesh, engine=engine))
        found[name] = time.perf_counter() - began
    return found


def many_clients(scale: Scale, method: str) -> Row:
    """Many clients with states of their own, of which few take part in a round; the states are on the host.

    The start is the initial states and the first round, compiled; accuracies are of the cohorts' models after their
    training in the first and in the last rounds, and of what everyone deploys at the end.
    """
    clients, participation, rounds = scale.many_clients
    data = workload.federation(clients, scale.growth_examples)
    settings = simulate.Settings(
        rounds=rounds, participation=participation, eval_every=rounds, chunk=workload.usual_chunks()[0]
    )
    seconds, trained, received, state_bytes = [], [], float("nan"), 0
    began = time.perf_counter()
    federated = workload.method(method, scale), data, settings, jax.random.key(0)
    for result in simulate.run(*federated, mesh=simulate.client_mesh(), state_on="host", donate=True):
        seconds.append(time.perf_counter() - began)
        trained.append(100 * float(result.trained["accuracy"][result.cohort].mean()))
        if result.received is not None:
            received = 100 * float(result.received["accuracy"].mean())
            state_bytes = byte_count(result.state.clients)
        began = time.perf_counter()
    usual = statistics.median(seconds[1:-1])
    return {
        "method": method,
        "cohort": settings.cohort_size(clients, 0),
        "s, start": seconds[0],
        "s/round": usual,
        "s/evaluation": seconds[-1] - usual,
        "states MiB": state_bytes / _MIB,
        "peak MiB": measure.peak_memory() / _MIB,
        "trained first %": sum(trained[:3]) / 3,
        "trained last %": sum(trained[-3:]) / 3,
        "received %": received,
    }


def sweep(scale: Scale, together: bool) -> Row:
    """FedPAC with several strengths of its alignment and several seeds: as one sweep, or one run after another."""
    runs, clients, examples, rounds = scale.sweep
    data = workload.federation(clients, examples)
    settings = simulate.Settings(rounds=rounds, chunk=workload.usual_chunks()[0])
    strengths, seeds = [0.1 * 2 ** (run // 2) for run in range(runs)], [run % 2 for run in range(runs)]

    def make(lam):
        return workload.method("fedpac", scale, epochs=1, lam=lam)

    mesh = simulate.client_mesh()
    began, later = time.perf_counter(), 0.0
    if together:
        keys = jnp.stack([jax.random.key(seed) for seed in seeds])
        values = {"lam": jnp.asarray(strengths)}
        options = {"chunk": settings.chunk, "mesh": mesh, "donate": True}
        results = list(pfl_jax.engine.sweep.run(make, data, settings, keys, values, **options))
        later = sum(result.seconds for result in results[1:])
    else:
        for lam, seed in zip(strengths, seeds, strict=True):
            results = list(simulate.run(make(lam), data, settings, jax.random.key(seed), mesh=mesh, donate=True))
            later += sum(result.seconds for result in results[1:])
    return {"s, with compilation": time.perf_counter() - began, "s, after round 1": later}


def start(words: list[str]) -> Row:
    """Run an experiment, its dataset and options, and count its programs, and those that the cache did not have."""
    from experiments.run.command import main

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


def main(kind: str, request: dict[str, Any]) -> Row:
    """Run one child process: the function of that name, with the request as its arguments."""
    if "scale" in request:
        request["scale"] = Scale(**request["scale"])
        # What is compiled again and again is a part of what sweeps save.
        jax_config.prepare_jax(compilation_cache=kind != "sweep")
    kinds = (growth, memory_growth, many_clients, many_states, large_cohort, runs, sweep, start)
    work = {made.__name__: made for made in kinds}
    return work[kind](**request)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], json.loads(sys.argv[2]))))
