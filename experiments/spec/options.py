"""All options of a run in one class, and the decisions that follow from the notes beside them.

These are the command line and its help, the identity of a run, options without effect, and those that a resumed run
may change and a sweep may vary.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_type_hints

from experiments.spec.choices import MethodName, PresetName, ProcedureName, networks
from experiments.spec.groups import Data, Evaluation, Federation, Privacy, Robustness, Training
from experiments.spec.machine_groups import Engine, Output
from experiments.spec.option_notes import Also, Needs, Option, Trait, assignments, flag, label, marked, noted
from pfl_jax.errors import InvalidInput
from pfl_jax.networks.models import MODELS
from pfl_jax.validation import ReadWith, check_value, listed, unknown


@dataclass(frozen=True, kw_only=True)
class Options(Engine, Output, Evaluation, Privacy, Training, Robustness, Federation, Data):
    """Options that all methods have; these three determine the defaults of all others."""

    method: Annotated[MethodName, Trait.CODE, Also("algorithm", "alg")]
    """Method, built in or FILE.py:NAME of your own factory; `--method NAME --help` shows its own options."""
    preset: PresetName
    """Paper whose settings are the defaults of all other options; on the papers' data sets by default the method's own
    paper."""
    procedure: ProcedureName | None = None
    """How FedAS's paper prints it (print) or its released code does it (release): the batches of every method, and the
    options of fedas, with release the alignment of one backbone by all clients of a cohort in turn. By default print
    with --preset fedas."""

    def check(self) -> None:
        """Raise InvalidInput for the first option that is out of range, or stands without one that it needs."""
        for name, kind in KINDS.items():
            check_value(flag(name), getattr(self, name), kind)
        given = {name for name in KINDS if getattr(self, name) is not None and getattr(self, name) is not False}
        for name, needed in NEEDS.items():
            for names in needed if name in given else ():
                if not given & {*names}:
                    raise InvalidInput(f"{flag(name)} needs {listed([*map(flag, names)])}")
        names = networks(self.model)
        if strange := [name for name in names if len(names) > 1 and name not in MODELS]:
            raise InvalidInput(unknown("model in a list", strange[0], MODELS))
        if self.networks is not None and len(names) == 1:
            raise InvalidInput("--networks needs a list of networks as --model, such as fedpac_cnn,mlp")
        for name in ("hidden", "size_choices"):
            if (least := min(getattr(self, name) or [1])) < 1:
                raise InvalidInput(f"{flag(name)} must be at least 1 each, not {least}")
        if self.wandb and importlib.util.find_spec("wandb") is None:
            raise InvalidInput("--wandb needs a package that is not installed: pip install wandb")
        if not 0 <= self.seed < 2**32:
            raise InvalidInput(f"--seed must be between 0 and {2**32 - 1}, not {self.seed}")


_hints = get_type_hints(Options, include_extras=True)
KINDS: dict[str, Any] = {field.name: _hints[field.name] for field in fields(Options)}
"""Types of the options, with their notes."""

COMMON = {field.name: Option(field.name, KINDS[field.name], field.default) for field in fields(Options)}
"""Name -> option that all methods have."""

GROUPS: dict[str, Any] = {
    "data": Data,
    "client": Federation,
    "robustness": Robustness,
    "training": Training,
    "privacy": Privacy,
    "evaluation": Evaluation,
    "result": Output,
    "device": Engine,
}
"""Heading in the help, to which it adds the word "options" -> group; its docstring is there too."""

CONDITIONS = noted(KINDS, ReadWith)
"""Option -> conditions under which it is read, all of which must be met."""

SYNONYMS = {name: names[0] for name, names in noted(KINDS, Also).items()} | {
    name: names for group in GROUPS.values() for name, names in getattr(group, "of_methods", {}).items() if names
}
"""Option -> its names in PFLlib, FL-bench and similar code."""

NEEDS = noted(KINDS, Needs)
"""Option -> what must be given with it."""

RESULT_NEUTRAL = frozenset(marked(KINDS, Trait.NEUTRAL, Trait.BY_DIGEST))
"""Options that do not change the results of a run; of --source and --data, only the data that was loaded matters.
`identity.result_neutral` has an exception."""


def names_of(group: type) -> list[str]:
    """Options of a group in the order of the help; hyper-parameters of methods (`of_methods`) come first."""
    return [*getattr(group, "of_methods", ()), *(field.name for field in fields(group))]


def read_with(name: str, value: Any) -> list[str]:
    """Options that are read only with some values of the option `name`, and with this value."""
    return [
        option
        for option, conditions in CONDITIONS.items()
        if any(one.name == name and is_met(one, value) for one in conditions)
    ]


def unread(values: Mapping[str, Any], conditions: Mapping[str, Sequence[ReadWith]]) -> dict[str, str]:
    """Options that are not read with the values of others -> why not, such as "with --manner serial"."""
    whys: dict[str, str] = {}
    for name, others in conditions.items():
        for other in others if name in values else ():
            if other.name in values and not is_met(other, value := values[other.name]):
                is_off = value is None or (value == 0 and not isinstance(value, bool))
                shown = label(value) if isinstance(value, str) else value
                why = f"without {flag(other.name)}" if is_off else f"with {assignments({other.name: shown})}"
                whys.setdefault(name, why)
    return whys


def is_met(condition: ReadWith, value: Any) -> bool:
    """Whether the value of an option meets a condition: of lora:8 the kind, of several networks one."""
    if not isinstance(value, str):
        return condition.is_met(value)
    words = networks(value) if condition.name == "model" else [value.partition(":")[0]]
    return any(map(condition.is_met, words))
