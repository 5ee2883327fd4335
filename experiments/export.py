"""Export of one client's model of a finished run, as safetensors (`pfl_jax.files`) or Flax's MessagePack.

    python -m experiments.export runs/digits-fedper-seed0-001 --client 3 --to model.safetensors

In a notebook, `from experiments.export import load_run, load_runs, plot_curves, read_metrics` gives functions that
load a run, make a table of many runs, draw curves for a paper, and read the evaluations of a run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
from flax import serialization
from rich.console import Console

from experiments.cli.parser import check_new, parse
from experiments.folder.load import read_metrics
from experiments.folder.stored_runs import load_runs
from experiments.host.console import Terminal, print_line
from experiments.host.exit_codes import exit_code, exit_process
from experiments.run.loaded_run import LoadedRun, load_run
from experiments.show.curves import plot_curves
from experiments.spec.option_notes import Argument
from pfl_jax.atomic_write import write_binary
from pfl_jax.files import save_model

__all__ = ["LoadedRun", "load_run", "load_runs", "main", "plot_curves", "read_metrics"]

ENDINGS = (".safetensors", ".msgpack")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Command line of the export."""

    run: Annotated[Path, Argument("positional", "RUN")]
    """Folder of a finished run."""
    client: int = 0
    """Number of the client, from 0."""
    to: Annotated[Path, Argument(metavar="FILE")]
    """New file, .safetensors or .msgpack."""
    method: str | None = None
    """FILE.py:NAME of the run's method, if it is your own; a file that only the folder names is not executed."""
    model: str | None = None
    """FILE.py:NAME of the run's model, if it is your own."""
    loss: str | None = None
    """FILE.py:NAME of the run's loss, if it is your own."""


def main(arguments: Sequence[str] | None = None) -> int:

    def work() -> None:
        options, _ = parse(Options, "experiments.export", __doc__, arguments)
        check_new("--to", options.to, *ENDINGS)
        run = load_run(options.run, method=options.method, model=options.model, loss=options.loss)
        _export(run, options.client, options.to.expanduser(), Terminal())

    return exit_code(work)


def _export(run: LoadedRun, client: int, target: Path, console: Console) -> None:
    params, dataset = run.params(client), run.dataset
    if target.suffix == ".msgpack":
        content = serialization.msgpack_serialize(serialization.to_state_dict(jax.tree.map(np.asarray, params)))
        write_binary(target, lambda file: file.write(content))
    else:
        about = {"method": run.summary["method"], "data": dataset.description, "client": str(client)}
        about |= {"input_shape": " ".join(map(str, dataset.input_shape)), "num_classes": str(dataset.num_classes)}
        save_model(target, params, dataset, **about)
    print_line(console, f"saved {sum(leaf.size for leaf in jax.tree.leaves(params)):,} parameters as {target}")


if __name__ == "__main__":
    exit_process(main())
