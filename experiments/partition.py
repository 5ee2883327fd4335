"""Partitions as files: the rows of each client, pictures of them, and conversion to LEAF's and Flower's formats.

    python -m experiments.partition --dataset digits --partition dirichlet --num-clients 10 --to digits.json

Accepts the options of the experiment that --dataset names, and trains nothing. Every experiment accepts the new file as
its partition: `--partition digits.json`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from rich.console import Console

from experiments import DATASETS
from experiments.cli import command as parsing
from experiments.cli.parser import check_new, parse
from experiments.commands.report_charts import classes_by_clients
from experiments.host.console import Terminal, print_line, warnings_as_notes
from experiments.host.exit_codes import exit_code, exit_process
from experiments.run.data import divide, load_examples
from experiments.show.pictures import ENDINGS, Picture
from experiments.show.pictures import save as draw
from experiments.spec.option_notes import Argument, label
from pfl_jax.data import interchange, partition_files
from pfl_jax.data.allocation import Partition
from pfl_jax.data.sources import Dataset
from pfl_jax.errors import InvalidInput

File = Annotated[Path | None, Argument(metavar="FILE")]
NewFolder = Annotated[Path | None, Argument(metavar="DIR")]


@dataclass(frozen=True)
class Options:
    """Command line; at least one file or folder must be given."""

    dataset: Annotated[str, Argument(text=", ".join(DATASETS))] = "digits"
    to: File = None
    """New .json file of the partition."""
    picture: File = None
    """Picture of classes by clients, .png, .svg or .pdf."""
    npz: File = None
    """The clients' rows as an .npz file for experiments.custom --client-column client."""
    leaf: NewFolder = None
    """New folder of the clients' rows as LEAF's JSON."""
    flower: NewFolder = None
    """New folder of the clients' rows as Flower's partitions; needs pip install datasets."""


def main(arguments: Sequence[str] | None = None) -> int:

    def work() -> None:
        options, rest = parse(Options, "experiments.partition", __doc__, arguments, more=True)
        if not any((options.to, options.picture, options.npz, options.leaf, options.flower)):
            raise InvalidInput("missing: give --to, --picture, --npz, --leaf or --flower; see --help")
        check_new("--to", options.to, ".json")
        check_new("--picture", options.picture, *ENDINGS)
        check_new("--npz", options.npz, ".npz")
        spec = parsing.parse(options.dataset, rest)
        if spec.shift != "none":
            raise InvalidInput("--shift changes the examples, not the partition: give it to the experiment")
        _write(options, spec, Terminal())

    return exit_code(work)


def _write(options: Options, spec: parsing.Spec, console: Console) -> None:
    spec, dataset = load_examples(spec, console)
    with warnings_as_notes(console):
        parts = divide(spec, dataset)
    number = len(parts.train)
    names = [f"{client:0{len(str(number - 1))}d}" for client in range(number)]
    names = dataset.client_names if spec.partition == "natural" else names
    if options.to is not None:
        partition_files.save(options.to.expanduser(), parts, dataset)
    if options.picture is not None:
        draw(picture(dataset, parts, label(spec.partition)), options.picture.expanduser())
    if options.npz is not None:
        interchange.write_npz(options.npz.expanduser(), dataset, parts, names)
    if options.leaf is not None:
        interchange.write_leaf(options.leaf.expanduser(), dataset, parts, names)
    if options.flower is not None:
        interchange.write_flower(options.flower.expanduser(), dataset, parts)
    for path in filter(None, (options.to, options.picture, options.npz, options.leaf, options.flower)):
        print_line(console, f"{number} clients of {dataset.description} in {path}")


def picture(dataset: Dataset, parts: Partition, name: str) -> Picture:
    """Picture of a partition with this name: each client's training examples by class, clients from left to right."""
    if not dataset.num_classes:
        raise InvalidInput(f"--picture shows classes, which {dataset.description} does not have")
    y = np.concatenate([dataset.train_y, dataset.test_y])
    table = np.stack([np.bincount(y[rows], minlength=dataset.num_classes) for rows in parts.train])
    return classes_by_clients(table, f"Partition {name} of {dataset.description}", dataset.class_names)


if __name__ == "__main__":
    exit_process(main())
