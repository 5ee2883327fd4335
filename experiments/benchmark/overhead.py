"""Overhead of a run beside its rounds: all scores instead of accuracy alone, lines of the log, checkpoints."""

import itertools
import json
import tempfile
from pathlib import Path

import jax
import numpy as np

from experiments.benchmark import measure, workload
from experiments.benchmark.jax_rounds import Rounds
from experiments.benchmark.records import Row, Section
from experiments.benchmark.workload import Setup
from experiments.execution.history import History
from experiments.execution.records import info_record
from experiments.results.run_folder import Evaluation
from pfl_jax.engine.checkpoint import Checkpoints
from pfl_jax.tasks import CLASSIFICATION, Task


def overhead(setup: Setup) -> Section:
    """Time of FedPAC rounds with accuracies alone and with all scores, and of the files written after each."""
    scale = setup.scale
    data = workload.federation(scale.clients, scale.examples)

    def rounds(task: Task) -> Rounds:
        method = workload.method("fedpac", scale)
        assert method.work is not None
        method = method._replace(work=method.work._replace(model=method.work.model._replace(task=task)))
        return Rounds(method, data, participation=1.0, chunk=setup.chunk, mesh=setup.mesh)

    setup.notify("FedPAC rounds with accuracies alone and with all scores")
    plain, full = rounds(CLASSIFICATION._replace(scores=CLASSIFICATION.scores[:1])), rounds(CLASSIFICATION)
    times = measure.medians(scale.repetitions[1], {"plain": plain.both, "full": full.both})
    setup.notify("lines of the log and checkpoints")
    written = _writing(full, np.asarray(data.test_count), scale.repetitions[0])
    parts = {"loss, macro-F1 and AUC in addition": times["full"] - times["plain"], **written}
    rows: list[Row] = [{"what": "round and both evaluations, accuracies alone", "s": times["plain"]}]
    rows += [{"what": what, "s": s, "of the round %": 100 * s / times["plain"]} for what, s in parts.items()]
    return Section(f"Overhead of a run beside its rounds, FedPAC, {scale.clients} clients", rows)


def _writing(rounds: Rounds, counts: np.ndarray, repetitions: int) -> dict[str, float]:
    """Median seconds of writing a line of the log, and a checkpoint."""
    outcome = rounds.outcome
    assert outcome is not None
    received, trained = (jax.tree.map(np.asarray, scores) for scores in (rounds.evaluate(), rounds.state.trained))
    history = History([Evaluation(1, received, trained, counts, 1.0, 1.0)])
    numbers = itertools.count()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "metrics.jsonl"

        def line() -> None:
            further = {"cohort": np.asarray(outcome.cohort.clients).tolist(), "info": info_record(outcome.info)}
            with log.open("a") as file:
                file.write(json.dumps(history.evaluations[0].record() | further) + "\n")

        def save() -> None:
            history.save(Checkpoints(Path(folder) / str(next(numbers))), rounds.state, log, {})

        # Not timed: the first checkpoint imports orbax.
        line()
        save()
        return measure.medians(repetitions, {"a line of the log": line, "a checkpoint": save})
