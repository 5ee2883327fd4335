"""Compilation cache on disk; its errors cost time but never end a run."""

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

_TROUBLE = re.compile(r"Error (reading|writing) persistent compilation cache entry for '([^']*)': (?:\w+: )?(.*)", re.S)


def folder() -> Path | None:
    """Folder of JAX's compilation cache; None if it is off."""
    place = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    return None if place is None else Path(place)


@contextlib.contextmanager
def repair_cache(notify: Callable[[str], None]) -> Iterator[None]:
    """Repair JAX's cache of compiled programs while it is used.

    JAX writes its files in place: a full disk, or a process that is killed meanwhile, leaves an incomplete
    file, which JAX never replaces and warns of at each start. Such files are removed here, so that complete ones are
    written, and the problem is reported once, in one line.

    Args:
      notify: receives one message if programs cannot be kept, or are damaged.
    """
    place, told = folder(), set()
    with warnings.catch_warnings():
        usual = warnings.showwarning
        warnings.filterwarnings("always", message="Error (reading|writing) persistent compilation cache entry")

        def show(message: Any, *rest: Any, **further: Any) -> None:
            found = _TROUBLE.match(str(message))
            if found is None or place is None:
                usual(message, *rest, **further)
                return
            deed, program, reason = found.groups()
            for path in place.glob(f"{program}-*"):
                with contextlib.suppress(OSError):
                    path.unlink()
            if deed not in told:
                told.add(deed)
                reason = " ".join(reason.split())
                if deed == "reading":
                    notify(f"Note: a compiled program in {place} cannot be read and is compiled anew ({reason}).")
                else:
                    notify(
                        f"Note: compiled programs cannot be kept in {place} ({reason}): the next start compiles too."
                    )

        warnings.showwarning = show
        yield
