"""What is known of an option beside its name, type and help: notes in the `Annotated` of its field in spec.py."""

import enum
from typing import Any, NamedTuple, TypeVar

from pfl_jax.hyper_parameters import notes_of

Note = TypeVar("Note")


class Mark(enum.Enum):
    """What an option is to a run."""

    NEUTRAL = "results do not depend on it"
    BY_DIGEST = "results depend on it through the data's digest alone"
    OWN_DATA = "for the user's own data"
    FILES = "for data in files that --data names"
    PROCESSES = "for runs in several processes"
    CHOOSES = "decides which setting of a sweep is the best"
    CODE = "may be FILE.py:NAME"
    FILE = "a file by whose content runs are told apart"


class Also(tuple[str, ...]):
    """Names of an option in PFLlib, FL-bench and similar code."""

    __slots__ = ()

    def __new__(cls, *names: str) -> "Also":
        return super().__new__(cls, names)


class NotInSweeps(NamedTuple):
    """Why a sweep does not have an option."""

    reason: str


def flag(name: str) -> str:
    """Option as written on the command line, such as --train-size."""
    return "--" + name.replace("_", "-")


def marked(kinds: dict[str, Any], *marks: Mark) -> tuple[str, ...]:
    """Names of the options of these types that have one of the marks, in their order."""
    return tuple(name for name, found in noted(kinds, Mark).items() if {*marks} & {*found})


def noted(kinds: dict[str, Any], note: type[Note]) -> dict[str, tuple[Note, ...]]:
    """Option -> its notes of a class, for those that have any."""
    found = {name: tuple(one for one in notes_of(kind) if isinstance(one, note)) for name, kind in kinds.items()}
    return {name: notes for name, notes in found.items() if notes}
