"""Data that change in the course of a run, and what is recorded of it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.folder.best_round import PHASE, PHASES, UNTRAINED
from experiments.folder.run_folder import Line, rounded
from experiments.spec.option_notes import flag
from experiments.spec.spec import Spec
from pfl_jax.base import Scores
from pfl_jax.data import phases
from pfl_jax.data.partition import Partition
from pfl_jax.data.sources import Dataset
from pfl_jax.engine.simulate import RoundResult
from pfl_jax.errors import InvalidInput
from pfl_jax.primitives.metrics import summarize
from pfl_jax.tasks import Task


def phases_of(spec: Spec, dataset: Dataset, parts: Partition, shift: Mapping[str, Any]) -> phases.Phases | None:
    """Data of each phase, of equal lengths; None if they do not change. `shift` as `build.shift_of` has it."""
    number = spec.phases
    if number is None:
        return None
    for name in ("held_out_clients", "dp_clip", "distributed", "patience"):
        if getattr(spec, name):
            raise InvalidInput(f"{flag(name)} cannot be given with --phases")
    if spec.hyper_parameters.get("client_clip") is not None:
        raise InvalidInput("--client-clip cannot be given with --phases: privacy is accounted for data that stay")
    if spec.rounds < number:
        raise InvalidInput(f"--phases {number} needs as many --rounds at least, not {spec.rounds}")
    datasets, partitions = [dataset], [parts] * number
    if spec.change == "rotation":
        datasets = [phases.rotated(dataset, 360 * place / number) for place in range(number)]
    elif spec.change == "classes":
        partitions = phases.classes(dataset, parts, number, spec.seed)
    else:
        partitions = phases.clients(parts, number, spec.seed)
    ends = np.diff(np.arange(number + 1) * spec.rounds // number)
    one = datasets if len(datasets) > 1 else dataset
    return phases.federate_phases(one, partitions, ends.tolist(), **shift, seed=spec.seed)


def phase_record(result: RoundResult, data: phases.Phases | None, task: Task) -> Line:
    """Entries of an evaluation about the phases; none if the data do not change."""
    if data is None or result.phases is None or result.untrained is None:
        return {}

    def means(of: Sequence[Scores]) -> list[float]:
        tests = (np.asarray(part.test_count) for part in data.parts)
        return [rounded(summarize(one, test, task).mean) for one, test in zip(of, tests, strict=True)]

    number = data.phase_of(result.round - 1)
    return {PHASE: number, PHASES: means(result.phases), UNTRAINED: means(result.untrained)}
