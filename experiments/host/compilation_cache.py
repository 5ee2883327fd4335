"""Compilation cache on disk; its errors cost time but do not end a run."""

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

_CACHE_WARNING = re.compile(
    r"Error (reading|writing) persistent compilation cache entry for '([^']*)': (?:\w+: )?(.*)", re.S
)


def folder() -> Path | None:
    """Folder of JAX's compilation cache; None if it is off."""
    path = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    return None if path is None else Path(path)


@contextlib.contextmanager
def repair_cache(notify: Callable[[str], None]) -> Iterator[None]:
    """Context that removes damaged files from JAX's compilation cache.

    JAX does not write cache files atomically: a full disk or a killed process leaves an incomplete file, which JAX does
    not replace and warns about at each start. Here such files are removed, so that JAX writes them again, and the
    problem is reported once, in one line.

    Args:
      notify: function that receives one message if programs cannot be cached, and one if cached programs are damaged.
    """
    cache, reported = folder(), set()
    with warnings.catch_warnings():
        previous = warnings.showwarning
        warnings.filterwarnings("always", message="Error (reading|writing) persistent compilation cache entry")

        def show(message: Any, *args: Any, **kwargs: Any) -> None:
            found = _CACHE_WARNING.match(str(message))
            if found is None or cache is None:
                previous(message, *args, **kwargs)
                return
            operation, program, reason = found.groups()
            for path in cache.glob(f"{program}-*"):
                with contextlib.suppress(OSError):
                    path.unlink()
            if operation not in reported:
                reported.add(operation)
                reason = " ".join(reason.split())
                if operation == "reading":
                    notify(f"Note: a compiled program in {cache} cannot be read and is compiled anew ({reason}).")
                else:
                    notify(
                        f"Note: compiled programs cannot be kept in {cache} ({reason}): the next start compiles too."
                    )

        warnings.showwarning = show
        yield
