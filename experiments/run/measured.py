"""Commands whose runs are compared by a paper's definition of the accuracy, which options can change."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from experiments.cli import parser
from experiments.cli.effects import RESULT_NEUTRAL
from experiments.cli.options import Average, Protocol, Score
from experiments.papers import settings
from experiments.papers.settings import Measure
from experiments.run import batch
from pfl_jax.hyper_parameters import Count


@dataclass(frozen=True, kw_only=True)
class MeasuredBatch(batch.Batch):
    """Command of a paper's runs."""

    paper: str
    seeds: Count = 1
    """Number of seeds, from 0."""
    eval_protocol: Protocol | None = None
    """Reported protocol; by default the paper's own protocol. before_aggregation is measured only
    on request; such runs also serve the other two, with the same --out."""
    score: Score | None = None
    """Reported round; by default the paper's choice. The best one is chosen on test examples, as in the
    papers."""
    average: Average | None = None
    """What the mean is over, clients or test examples; by default the paper's choice."""

    @property
    def measure(self) -> Measure:
        """Definition of the accuracy: the paper's, with the requested changes."""
        asked = {"protocol": self.eval_protocol, "score": self.score, "average": self.average}
        return settings.MEASURES[self.paper]._replace(**{name: word for name, word in asked.items() if word})

    @property
    def all_words(self) -> tuple[str, ...]:
        """Words for every run."""
        asked = ("--eval-protocol", "before_aggregation") if self.eval_protocol == "before_aggregation" else ()
        return (*self.words, *asked)


def folder_name(name: str, number: Any, words: Sequence[str]) -> str:
    """Folder for each set of options that affect results, so that a trial run does not block the full one."""
    without = RESULT_NEUTRAL - {"source"}
    # One protocol of evaluation is measured by request only.
    relevant = sorted(
        " ".join(part)
        for part in parser.by_option(words)
        if not parser.given(part) & without or "before_aggregation" in " ".join(part)
    )
    return parser.slug(" ".join([f"{name}-{number}", *relevant]))
