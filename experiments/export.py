"""Export of one client's model of a finished run, as safetensors or Flax's MessagePack.

    python -m experiments.export runs/digits-fedper-seed0-001 --client 3 --to model.safetensors

In a notebook, `from experiments.export import load_run, load_runs, read_metrics` loads a run, a table of many runs, and
the evaluations of one run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console

from experiments.cli.exit_codes import exit_code, leave
from experiments.cli.parser import Argument, parse
from experiments.folder.load import read_metrics
from experiments.folder.models import ENDINGS, save
from experiments.folder.stored_runs import load_runs
from experiments.host.console import Terminal, print_line
from experiments.run.loaded_run import LoadedRun, load_run
from pfl_jax.errors import InvalidInput

__all__ = ["LoadedRun", "load_run", "load_runs", "main", "read_metrics"]


@dataclass(frozen=True)
class Words:
    """Command line."""

    run: Annotated[Path | None, Argument("positional", "RUN")] = None
    """Folder of a finished run."""
    client: int = 0
    """Whose model, from 0."""
    to: Annotated[Path | None, Argument(metavar="FILE")] = None
    """New file, .safetensors or .msgpack."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Export a model with command-line arguments, by default those of this process; return the exit code."""

    def work() -> None:
        words, _ = parse(Words, "experiments.export", __doc__, arguments)
        if words.run is None:
            raise InvalidInput("missing: RUN, the folder of a finished run; see --help")
        if words.to is None:
            raise InvalidInput(f"missing: --to, a new file that ends in {' or '.join(ENDINGS)}; see --help")
        target = words.to.expanduser()
        if target.suffix not in ENDINGS:
            raise InvalidInput(f"--to {words.to}: the name of a model's file ends in {' or '.join(ENDINGS)}")
        if target.exists():
            raise InvalidInput(f"--to {words.to} is there already: give another name, or remove it")
        _export(load_run(words.run), words.client, target, Terminal())

    return exit_code(work)


def _export(run: LoadedRun, client: int, target: Path, console: Console) -> None:
    params, dataset = run.params(client), run.dataset
    about = {
        "method": run.summary["method"],
        "data": dataset.description,
        "client": str(client),
        "input_shape": " ".join(map(str, dataset.input_shape)),
        "num_classes": str(dataset.num_classes),
    }
    if dataset.mean is not None and dataset.std is not None:
        # x = (pixel / 255 - mean) / std
        about |= {"mean": " ".join(map(str, dataset.mean)), "std": " ".join(map(str, dataset.std))}
    count = save(target, params, about)
    print_line(console, f"saved {count:,} parameters as {target}")


if __name__ == "__main__":
    leave(main())
