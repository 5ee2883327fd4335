"""Options as they are written on the command line."""

from collections.abc import Mapping
from typing import Any


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
