"""Lines on the console, printed literally, and the progress of a run."""

import contextlib
import logging
import statistics
import time
import warnings
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.folder.run_folder import score_text
from experiments.host.exit_codes import close_output
from pfl_jax.tasks import CLASSIFICATION, Score


class Terminal(Console):
    """Console on stdout without markup: "[red]" and ":bug:" in a name are printed literally.

    If the reader of stdout exits, as `head` does, the command still runs to its end.
    """

    def __init__(self, **options: Any):
        super().__init__(markup=False, emoji=False, **options)

    def print(self, *objects: Any, crop: bool = False, **options: Any) -> None:
        """Print with `rich`; tables that are wider than the terminal keep their last columns."""
        super().print(*objects, crop=crop, **options)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        close_output()


def print_line(console: Console, text: str, style: str | None = None) -> None:
    """Print a line, however long, in a style of rich such as "bold"."""
    console.print(text, style=style, soft_wrap=True, highlight=False, markup=False)


def print_text(console: Console, text: str, style: str | None = None) -> None:
    """Print a line, which a terminal breaks between words; files and pipes get it whole."""
    console.print(text, style=style, soft_wrap=not console.is_terminal, highlight=False, markup=False)


def print_notice(console: Console, text: str) -> None:
    """Print a line that the user should not miss."""
    print_text(console, text, "bold yellow")


@contextlib.contextmanager
def warnings_as_notes(console: Console) -> Iterator[None]:
    """Context that prints warnings as notices."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        print_notice(console, f"Note: {warning.message}.")


LINE_EVERY = 10.0
"""Seconds between two lines of progress if the output is not a terminal."""

COMPILING = "compiling the first round: usually 10 to 60 s, and some 5 s if its programs are in the cache"

LIBRARY = logging.getLogger("pfl_jax")
"""Logger with the library's messages about long computations."""


class RoundProgress(Progress):
    """Display of round, score, examples per second and remaining time; a context manager.

    Before the first round it shows the current step.
    """

    def __init__(self, console: Console, rounds: int, headline: str, score: Score = CLASSIFICATION.primary):
        status = TextColumn("{task.fields[status]}", markup=False)
        columns = TextColumn("round"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), status
        super().__init__(*columns, console=console, disable=not console.is_terminal)
        self._rounds, self._headline, self._score = rounds, headline, score
        self._durations: list[float] = []
        self._shown = float("-inf")
        self._bar = self.add_task("", total=rounds, status="")
        self._handler = logging.Handler(logging.INFO)
        self._handler.emit = lambda record: self._tell(record.getMessage())

    def start(self) -> None:
        """Begin the display, including the library's messages."""
        super().start()
        LIBRARY.addHandler(self._handler)
        LIBRARY.setLevel(logging.INFO)
        self._tell(COMPILING)

    def stop(self) -> None:
        """End the display."""
        LIBRARY.removeHandler(self._handler)
        LIBRARY.setLevel(logging.NOTSET)
        super().stop()

    def _tell(self, text: str) -> None:
        self.update(self._bar, status=text)
        if not self.console.is_terminal:
            print_line(self.console, text)

    def completed(
        self, number: int, seconds: float, accuracy: float | None, examples_per_second: float, over: str = ""
    ) -> None:
        """Show a completed round, from 1. `accuracy` is the latest mean over clients, None before the first evaluation;
        `over` is the number of these clients in words, "" for all."""
        self._durations.append(seconds)
        percent, name = self._score.percent, self._score.name
        shown = "not evaluated yet"
        if accuracy is not None:
            shown = f"{score_text(accuracy, percent=percent)}{' %' * percent} {name}"
        parts = [f"{self._headline} {shown}{f' over {over}' if over else ''}", f"{examples_per_second:,.0f} examples/s"]
        # The first round, with compilation, says nothing about the others.
        if len(self._durations) > 1:
            left = statistics.median(self._durations[1:][-10:]) * (self._rounds - number)
            parts.append(f"{duration(left)} left")
        status = " · ".join(parts)
        self.update(self._bar, completed=number, status=status)
        now = time.monotonic()
        if not self.console.is_terminal and (now - self._shown >= LINE_EVERY or number in (1, self._rounds)):
            self._shown = now
            print_line(self.console, f"round {number}/{self._rounds} · {status}")


def duration(seconds: float) -> str:
    """Hours, minutes and seconds: "1:02:03", "2:03"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
