"""Options as they are written on the command line, and files that they name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pfl_jax.errors import InvalidInput
from pfl_jax.hyper_parameters import listed


def flag(name: str) -> str:
    """Option as written on the command line, such as --train-size."""
    return "--" + name.replace("_", "-")


def option_words(values: Mapping[str, Any]) -> list[str]:
    """Options as command-line arguments: ["--rounds", "30", "--size-choices", "300", "600", "--no-drop-last"]."""
    words = []
    for name, value in values.items():
        if isinstance(value, bool):
            words.append(flag(name if value else f"no_{name}"))
        elif str(value).startswith("-"):
            # argparse takes such a text, as -1e-05, for an option.
            words.append(f"{flag(name)}={value}")
        else:
            words += [flag(name), *map(str, value if isinstance(value, list | tuple) else [value])]
    return words


def check_new(option: str, path: Path | None, *endings: str) -> None:
    """Raise InvalidInput if an option names a file that is there, or whose name has none of the endings."""
    if path is not None and endings and path.suffix not in endings:
        raise InvalidInput(f"{option} {path}: the name ends in {listed(endings)}")
    if path is not None and path.expanduser().exists():
        raise InvalidInput(f"{option} {path} is there already: give another name, or remove it")
