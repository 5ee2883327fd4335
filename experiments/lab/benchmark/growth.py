"""How time and memory grow with clients, rounds and runs; each measurement in a process of its own."""

import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pfl_jax.engine.sweep
from experiments.lab.benchmark import measure, workload
from experiments.lab.benchmark.child import in_process
from experiments.lab.benchmark.jax_rounds import Rounds, local_training
from experiments.lab.benchmark.records import Row, Section
from experiments.lab.benchmark.workload import Scale, Setup
from pfl_jax import models, simulate
from pfl_jax.methods import make_method


def growth(setup: Setup) -> Section:
    """Time and peak memory from few to many clients, a process for each, and a line fitted to the cohorts' times."""
    rows = []
    for clients, participation in setup.scale.growth:
        setup.notify(f"{clients} clients, participation {participation:g}, in a process of its own")
        rows.append(in_process(growing, setup.scale, clients=clients, participation=participation))
    cohorts, times = (np.array([row[heading] for row in rows], np.float64) for heading in ("cohort", "s/round"))
    slope, intercept = np.polyfit(cohorts, times, 1)
    apart = np.max(np.abs(times / (slope * cohorts + intercept) - 1))
    note = (
        f"{setup.scale.growth_examples} examples each; a line through these rounds rises by {slope * 1e3:.1f} ms "
        f"for each client of the cohort and is within {apart:.0%} of all of them"
    )
    return Section("FedPAC from few to many clients", rows, note)


def growing(scale: Scale, clients: int, participation: float) -> Row:
    """Time and memory of FedPAC's rounds over a federation of this many clients, and of its cohort trained alone."""
    mesh = simulate.client_mesh()
    data = workload.federation(clients, scale.growth_examples)
    rounds = Rounds(workload.method("fedpac", scale), data, participation)
    rounds.round()
    evaluation = measure.seconds(rounds.evaluate)
    peak = measure.peak_memory()
    alone = local_training(
        data, scale, clients=rounds.cohort_size, epochs=scale.epochs, chunk=workload.usual_chunk(), mesh=mesh
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
        "peak MiB": peak / measure.MIB,
    }


def memory_growth(setup: Setup) -> Section:
    """Memory over many rounds, programs compiled by two starts from an empty cache, and two runs in one process."""
    setup.notify(f"{setup.scale.memory_growth[0]} small rounds")
    held = in_process(resident, setup.scale)
    rows: list[Row] = [{"what": f"memory after round {number}", "MiB": mib} for number, mib in held.items()]
    setup.notify("two starts of the same experiment, and two runs in one process")
    with tempfile.TemporaryDirectory() as folder:
        rows += [{"what": f"start {number}"} | start_in(folder, str(number)) for number in (1, 2)]
        runs = in_process(two_runs, setup.scale, environment={"PFL_JAX_CACHE": f"{folder}/none"})
        rows += [{"what": f"{name} run in one process", "s": seconds} for name, seconds in runs.items()]
    return Section("Many rounds, second start", rows)


def resident(scale: Scale) -> Row:
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
    return {str(number): None if size is None else size / measure.MIB for number, size in found.items()}


def start_in(folder: str, name: str, method: str = "fedpac") -> Row:
    """One start of a small experiment, in a folder that has the cache too: programs needed and compiled, seconds."""
    words = ["digits", "--method", method, "--rounds", "2", "--num-clients", "4", "--out", f"{folder}/{name}"]
    began = time.perf_counter()
    counted = in_process(start, environment={"PFL_JAX_CACHE": f"{folder}/cache"}, words=words)
    return counted | {"s": time.perf_counter() - began}


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


def two_runs(scale: Scale) -> Row:
    """Seconds of two short runs with one engine, with another key, in the same process."""
    data, method = workload.federation(10, 20), workload.method("fedpac", scale, epochs=1)
    settings = simulate.Settings(rounds=2, chunk=workload.usual_chunk())
    mesh, found = simulate.client_mesh(), {}
    engine = simulate.build(method, settings, mesh).jit(mesh)
    for seed, name in enumerate(("first", "second")):
        began = time.perf_counter()
        list(simulate.run(method, data, settings, jax.random.key(seed), mesh=mesh, engine=engine))
        found[name] = time.perf_counter() - began
    return found


def sweep(setup: Setup) -> Section:
    """Time of a sweep and of its runs one after another in one process, compilation included in both."""
    rows: list[Row] = []
    for together, words in ((False, "one after another"), (True, "as a sweep")):
        # What is compiled again and again is a part of what sweeps save: no cache on disk.
        setup.notify(f"{setup.scale.sweep[0]} runs {words}")
        rows.append({"runs": words} | in_process(swept, setup.scale, compilation_cache=False, together=together))
    alone, faster = rows
    ratios = {heading.replace("s,", "ratio,"): alone[heading] / faster[heading] for heading in list(alone)[1:]}
    return Section(f"{setup.scale.sweep[0]} runs of FedPAC", [alone, faster | ratios])


def swept(scale: Scale, together: bool) -> Row:
    """FedPAC with several strengths of its alignment and several seeds: as one sweep, or one run after another."""
    runs, clients, examples, rounds = scale.sweep
    data = workload.federation(clients, examples)
    settings = simulate.Settings(rounds=rounds, chunk=workload.usual_chunk())
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
