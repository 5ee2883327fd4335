"""Export of one client's model of a finished run, as safetensors or Flax's MessagePack.

    python -m experiments.export runs/digits-fedper-seed0-001 --client 3 --to model.safetensors

In a notebook, `from experiments.export import load_run, load_runs, read_metrics` loads a run, a table of many runs, and
the evaluations of one run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import safetensors.numpy
from flax import serialization
from rich.console import Console

from experiments.cli.exit_codes import exit_code, leave
from experiments.cli.parser import Argument, check_new, parse
from experiments.folder.load import read_metrics
from experiments.folder.stored_runs import load_runs
from experiments.host.console import Terminal, print_line
from experiments.run.loaded_run import LoadedRun, load_run
from pfl_jax.atomic_write import write_binary
from pfl_jax.base import Params

__all__ = ["LoadedRun", "load_run", "load_runs", "main", "read_metrics"]

ENDINGS = (".safetensors", ".msgpack")


@dataclass(frozen=True, kw_only=True)
class Words:
    """Command line."""

    run: Annotated[Path, Argument("positional", "RUN")]
    """Folder of a finished run."""
    client: int = 0
    """Whose model, from 0."""
    to: Annotated[Path, Argument(metavar="FILE")]
    """New file, .safetensors or .msgpack."""
    trust: bool = False
    """Execute the files of the run's own --method, --model and --loss that its folder names."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Export a model with command-line arguments, by default those of this process; return the exit code."""

    def work() -> None:
        words, _ = parse(Words, "experiments.export", __doc__, arguments)
        check_new("--to", words.to, *ENDINGS)
        _export(load_run(words.run, trust=words.trust), words.client, words.to.expanduser(), Terminal())

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
    if dataset.preparation is not None:
        # Read by `pfl_jax.data.Preparation.from_json`.
        about["preparation"] = dataset.preparation.to_json()
    count = save(target, params, about)
    print_line(console, f"saved {count:,} parameters as {target}")


def save(path: Path, params: Params, about: dict[str, str]) -> int:
    """Write parameters to a new file; return how many there are.

    In safetensors a parameter's name is its path, "backbone.conv1.kernel", beside metadata `about`; .msgpack is read by
    `flax.serialization.msgpack_restore`.
    """
    arrays = jax.tree.map(np.asarray, params)
    if path.suffix == ".msgpack":
        content = serialization.msgpack_serialize(serialization.to_state_dict(arrays))
    else:
        leaves = jax.tree.leaves_with_path(arrays)
        named = {jax.tree_util.keystr(place, simple=True, separator="."): leaf for place, leaf in leaves}
        content = safetensors.numpy.save(named, about)
    write_binary(path, lambda file: file.write(content))
    return sum(leaf.size for leaf in jax.tree.leaves(arrays))


if __name__ == "__main__":
    leave(main())
