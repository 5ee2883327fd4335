"""Overhead of a run beside its rounds: all scores instead of accuracy alone, lines of the log, checkpoints."""

import itertools
import json
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from experiments.folder.run_folder import Evaluation
from experiments.lab.benchmark import measure, workload
from experiments.lab.benchmark.jax_rounds import Rounds
from experiments.lab.benchmark.records import Row, Section
from experiments.lab.benchmark.workload import Setup
from experiments.run.history import History
from experiments.run.records import info_record
from pfl_jax.base import ClientData, Scores
from pfl_jax.engine import rounds as engine
from pfl_jax.engine.checkpoint import Checkpoints
from pfl_jax.primitives.examples import map_examples


def overhead(setup: Setup) -> Section:
    """Time of FedPAC rounds with accuracies alone and with all scores, and of the files written after each."""
    scale = setup.scale
    data = workload.federation(scale.clients, scale.examples)

    def rounds() -> Rounds:
        method = workload.method("fedpac", scale)
        return Rounds(method, data, participation=1.0, chunk=setup.chunk, mesh=setup.mesh)

    setup.notify("FedPAC rounds with accuracies alone and with all scores")
    with mock.patch.object(engine, "score", _accuracy_alone):
        plain = rounds()
    full = rounds()
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


def _accuracy_alone(predict: Any, personal: Any, data: ClientData) -> Scores:
    """Scores of a client with the accuracy alone."""
    predicted = map_examples(lambda x: jnp.argmax(predict(personal, x), axis=-1), data.x, data.mask)
    count = jnp.sum(data.mask, dtype=jnp.float32)
    none = jnp.zeros(())
    return Scores(jnp.sum((predicted == data.y) & data.mask, dtype=jnp.float32) / count, none, none, none)
