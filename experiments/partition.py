"""Partitions as files: the rows of each client, drawn, and exchanged with LEAF and Flower.

    python -m experiments.partition --dataset digits --partition dirichlet --num-clients 10 --to digits.json

Takes the options of the experiment that --dataset names, and trains nothing. Every experiment takes the file in place
of a partition's name: `--partition digits.json`.
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
from experiments.host.console import Terminal, print_line
from experiments.host.exit_codes import exit_code, exit_process
from experiments.run.build import divide_and_tell, load_examples
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
class Words:
    """Command line; at least one file is wanted."""

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
        words, rest = parse(Words, "experiments.partition", __doc__, arguments, more=True)
        if not any((words.to, words.picture, words.npz, words.leaf, words.flower)):
            raise InvalidInput("missing: --to, --picture, --npz, --leaf or --flower, what to write; see --help")
        check_new("--to", words.to, ".json")
        check_new("--picture", words.picture, *ENDINGS)
        check_new("--npz", words.npz, ".npz")
        spec = parsing.parse(words.dataset, rest)
        if spec.shift != "none":
            raise InvalidInput("--shift changes the examples and not who has them: give it to the experiment")
        _write(words, spec, Terminal())

    return exit_code(work)


def _write(words: Words, spec: parsing.Spec, console: Console) -> None:
    spec, dataset = load_examples(spec, console)
    parts = divide_and_tell(spec, dataset, console)
    number = len(parts.train)
    names = [f"{one:0{len(str(number - 1))}d}" for one in range(number)]
    names = dataset.client_names if spec.partition == "natural" else names
    if words.to is not None:
        partition_files.save(words.to.expanduser(), parts, dataset)
    if words.picture is not None:
        draw(picture(dataset, parts, label(spec.partition)), words.picture.expanduser())
    if words.npz is not None:
        interchange.write_npz(words.npz.expanduser(), dataset, parts, names)
    if words.leaf is not None:
        interchange.write_leaf(words.leaf.expanduser(), dataset, parts, names)
    if words.flower is not None:
        interchange.write_flower(words.flower.expanduser(), dataset, parts)
    for path in filter(None, (words.to, words.picture, words.npz, words.leaf, words.flower)):
        print_line(console, f"{number} clients of {dataset.description} in {path}")


def picture(dataset: Dataset, parts: Partition, words: str) -> Picture:
    """Picture of the training examples of each class by client of a partition, which has a name, from left to right."""
    if not dataset.num_classes:
        raise InvalidInput(f"--picture: {dataset.description} has no classes, which it would show")
    y = np.concatenate([dataset.train_y, dataset.test_y])
    table = np.stack([np.bincount(y[rows], minlength=dataset.num_classes) for rows in parts.train])
    return classes_by_clients(table, f"Partition {words} of {dataset.description}", dataset.class_names)


if __name__ == "__main__":
    exit_process(main())
