"""Command line of one run, and its `Spec`."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.cli import parser
from experiments.cli.parser import OptionGroup, options_of, summary
from experiments.folder.run_folder import CONFIG
from experiments.host.exit_codes import exit_code
from experiments.spec import presets
from experiments.spec.choices import CUSTOM
from experiments.spec.hyper_parameters import method_options
from experiments.spec.option_notes import Option, assignments, identifier, is_own, label, texts_of
from experiments.spec.options import GROUPS, Options, names_of
from experiments.spec.own_code import CODE, method_factory
from experiments.spec.spec import DATASET, SELECTION, Spec, unknown_option, usual_values, values_in
from pfl_jax.errors import InvalidInput
from pfl_jax.frames import read_json
from pfl_jax.methods import METHODS
from pfl_jax.methods.factories import function_of


def main(dataset: str, arguments: Sequence[str] | None = None) -> int:
    """Run an experiment with command-line arguments, by default this process's; return the exit code."""

    def work() -> None:
        spec = parse(dataset, sys.argv[1:] if arguments is None else arguments)
        if spec.print_config:
            print(spec.as_json())
            return
        # Imported only here, so that errors and --help do not wait for it.
        from experiments.run.run import run

        if spec.distributed:
            from experiments.host import distributed, jax_config

            jax_config.prepare(spec)
            distributed.work_with_others(lambda processes: run(spec, processes=processes), spec)
        else:
            run(spec)

    return exit_code(work)


def parse(dataset: str, words: Sequence[str]) -> Spec:
    """Parse the words after `python -m experiments.DATASET` as a run; --help prints help and raises SystemExit(0)."""
    return Spec.of(dataset, **read(dataset, words))


def read(dataset: str, words: Sequence[str], **known: Any) -> dict[str, Any]:
    """Options of a run from a command line, and from the file that its --config names.

    Args:
      dataset: name of the experiment.
      words: words of the command line; --help prints help and raises SystemExit(0).
      **known: options that are decided already, and replace those in the file.
    """
    parser.choose("dataset", [dataset], presets.DEFAULT_PRESET)
    common = options_of(Options)
    # These options decide which other options there are, and their defaults.
    first = {name: common[name] for name in (*SELECTION, *CODE, "config", "resume")}
    chosen, _ = parser.split(words, [OptionGroup("", "", first)])
    stored: dict[str, Any] = {}
    if (file := chosen.get("config")) is not None:
        stored = values_in(file, known | texts_of(words))
        if (its_dataset := stored.pop(DATASET, dataset)) != dataset:
            raise InvalidInput(f"--config {file} is for {its_dataset}, not {dataset}")
    if chosen.get("resume") is not None and "method" not in chosen:
        stored |= _resumed_method(chosen)
    selection = {name: value for name, value in (stored | known).items() if name in SELECTION}
    chosen = {name: common[name].value(value) for name, value in selection.items()} | chosen
    usual = usual_values(dataset, chosen)
    every = common | method_options(usual["method"])
    every = {name: option._replace(default=usual[name]) for name, option in every.items()}
    groups = _grouped(usual["method"], every)
    found, others = parser.split(words, groups, f"experiments.{dataset}", _description(dataset, usual["preset"]))
    if others:
        raise InvalidInput(_unknown_word(others[0], every, usual["method"]))
    return stored | found


def _resumed_method(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Method of the run that --resume names; empty if it cannot be read, for which `resumed` then gives the reason."""
    folder = Path(chosen["resume"]).expanduser()
    try:
        config = read_json(folder / CONFIG)
        method = config["options"]["method"]
        known = {"method": method} if method in METHODS else {}
    except (InvalidInput, KeyError, TypeError):
        return {}
    if is_own(method):
        # Raises InvalidInput if the command does not name the file. Imported only here, since few commands need it.
        from experiments.run.resume import spec_of

        spec_of(config, folder, named=chosen)
    return known


def _grouped(method: str, options: Mapping[str, Option]) -> list[OptionGroup]:
    """Groups of all options of a run; the method's own group comes first."""
    shared = {name for group in GROUPS.values() for name in names_of(group)} | {*SELECTION}
    own = [*(name for name in options if name not in shared), *SELECTION]
    text = summary(function_of(method_factory(method))) or label(method)
    groups = [(identifier(method), text, own)]
    groups += [(heading, str(group.__doc__), names_of(group)) for heading, group in GROUPS.items()]
    return [
        OptionGroup(heading, text, {name: options[name] for name in names if name in options})
        for heading, text, names in groups
    ]


def _unknown_word(word: str, options: Mapping[str, Option], method: str) -> str:
    """Error message for a word that is not an option of a run with this method."""
    head = word.partition("=")[0].replace("_", "-")
    if head.startswith("--"):
        return unknown_option(head, [name for option in options.values() for name in option.flags], method)
    return parser.unknown_option(word, options)


def _description(dataset: str, preset: str) -> str:
    data = "your own data" if dataset == CUSTOM else dataset
    text = (
        f"Personalized federated learning on {data}. The defaults are the settings of the {preset} preset; "
        "the default of --method is that paper's own method."
    )
    smaller = presets.EMBEDDED.get((preset, dataset))
    return text if not smaller else f"{text} On embedded data the defaults are smaller: {assignments(smaller)}."
