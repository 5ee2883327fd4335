"""Options in a file, for --config: a .toml or .json of names and values, or the config.json of a run."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.cli.own_code import EXECUTED, is_own, read
from experiments.cli.parser import option_words
from experiments.fields import Mark, flag, marked
from experiments.spec import KINDS
from pfl_jax.errors import InvalidInput

DATASET = "dataset"
"""Entry with the name of the experiment, which is not an option."""


def words(path: str, dataset: str, named: Mapping[str, Any], *, trust: bool) -> list[str]:
    """Options of a file as words of a command line of an experiment, which come before those that are given.

    Args:
      path: of the file.
      dataset: name of the experiment.
      named: options that the command line gives itself; the file's values do not count.
      trust: whether the file may name code that is then executed.

    Raises:
      InvalidInput: it cannot be read, is for another experiment, or names code.
    """
    values = _read(Path(path).expanduser())
    if (of := values.pop(DATASET, dataset)) != dataset:
        raise InvalidInput(f"--config {path} is for {of}, not {dataset}")
    values = {name: value for name, value in values.items() if name not in named}
    for name in EXECUTED:
        if is_own(values.get(name)) and not trust:
            raise InvalidInput(
                f"--config {path} names {values[name]}, which would be executed: give {flag(name)} yourself, or --trust"
            )
    return option_words(values)


def content(dataset: str, options: Mapping[str, Any], hyper_parameters: Mapping[str, Any]) -> str:
    """What --print-config prints: all options on which results depend, as JSON."""
    left_out = marked(KINDS, Mark.NEUTRAL)
    # With --local-steps there are no epochs.
    values = {name: value for name, value in {**options, **hyper_parameters}.items() if name not in left_out}
    values = {name: value for name, value in values.items() if name != "epochs" or value is not None}
    return json.dumps({DATASET: dataset, **values}, indent=2)


def _read(path: Path) -> dict[str, Any]:
    text = read(path)
    try:
        values = tomllib.loads(text.decode()) if path.suffix == ".toml" else json.loads(text)
    except ValueError as error:
        raise InvalidInput(f"--config {path} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise InvalidInput(f"--config {path} has no names with values")
    if {"options", "hyper_parameters", "data"} <= values.keys():
        values = _of_a_run(values)
    values = {name.replace("-", "_"): value for name, value in values.items()}
    if nested := sorted(name for name, value in values.items() if isinstance(value, dict)):
        raise InvalidInput(f"--config {path}: {nested[0]} is no option: names stand without a section")
    return values


def options_of(config: dict[str, Any]) -> dict[str, Any]:
    """Options of a run; of one from before --procedure, with what its rounds say."""
    return {"procedure": "release" if config.get("procedure") else None} | config["options"]


def _of_a_run(config: dict[str, Any]) -> dict[str, Any]:
    """Names and values of a run's configuration: that of its results, and the kind of its data."""
    values = json.loads(content(config[DATASET], options_of(config), config["hyper_parameters"]))
    if config["data"]["source"] == "embedded":
        values["source"] = "embedded"
    return values
