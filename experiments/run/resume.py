"""Resumption of an interrupted run, or of a run to which rounds are added."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.folder.load import read_config, read_json
from experiments.folder.run_folder import CONFIG, METRICS, SUMMARY, RunFolder
from experiments.folder.version import RESUMED_BY, code_version, note_on_code, versions_behind
from experiments.run.build import Experiment
from experiments.run.records import privacy_record
from experiments.spec.identity import difference, fixed_rounds
from experiments.spec.option_notes import flag, is_own
from experiments.spec.options import PROCESSES, Options
from experiments.spec.own_code import CODE, check_unchanged, path_of
from experiments.spec.spec import Spec, stored_options
from pfl_jax.engine.checkpoint import FOLDER, Checkpoints
from pfl_jax.errors import InvalidInput

_NOT_STORED: dict[str, Any] = {"resume": None, "out": None, "config": None, "tracker": None}
"""Options that are not taken from the stored run -> values if the resuming command does not give them: a tracker, for
example, is executed only if that command names it."""


def resumed(spec: Spec) -> Spec:
    """Run that --resume names, continued in its own folder.

    Options beside --resume must equal the run's, except for more rounds; InvalidInput names a difference.
    """
    folder, given = Path(spec.resume or "").expanduser(), spec.given
    if "out" in given:
        raise InvalidInput("--out cannot be given with --resume: a run goes on in its own folder")
    if not (folder / CONFIG).is_file():
        began = (
            "; unless one is starting now, a run was killed at its start: remove the folder, and start it again"
            if (folder / METRICS).is_file()
            else ""
        )
        raise InvalidInput(f"--resume {folder}: the folder has no run{began}")
    if "rounds" not in given:
        refuse_finished(folder)
    if not (folder / METRICS).is_file():
        raise InvalidInput(f"--resume {folder}: {METRICS} is missing")
    config = read_config(folder)
    # All checks come before the run's own code is executed.
    with errors_of_config(folder):
        dataset = config["dataset"]
    if dataset != spec.dataset:
        raise InvalidInput(f"--resume {folder}: the run is on {dataset}, not {spec.dataset}")
    stored = spec_of(config, folder, named={kind: getattr(spec, kind) for kind in spec.own_code if kind in CODE})
    # The processes are always the command's, not the run's.
    taken = {name: spec.values[name] for name in (*given, *PROCESSES)}
    requested = stored.having(taken | {"resume": str(folder), "out": str(folder)})
    requested = dataclasses.replace(requested, own_code=stored.own_code | spec.own_code)
    if differs := difference(requested.having({"rounds": stored.rounds}), config, finished=False):
        raise InvalidInput(f"--resume {folder}: the run has {differs}")
    if "rounds" in given:
        _check_rounds(folder, stored, spec.rounds)
    return dataclasses.replace(requested, given=stored.given | given & {"rounds"})


def refuse_finished(folder: Path, rounds: int = 0) -> None:
    """Raise InvalidInput for the folder of a run that has finished, and has this number of rounds or more."""
    if (folder / SUMMARY).exists() and (not rounds or rounds <= read_config(folder)["options"]["rounds"]):
        raise InvalidInput(
            f"--resume {folder}: the run is finished, its results are in {folder / SUMMARY}; a larger --rounds adds "
            "rounds to it"
        )


def _check_rounds(folder: Path, options: Options, rounds: int) -> None:
    """Raise InvalidInput unless a run with these options can go on to a number of rounds."""
    refuse_finished(folder, rounds)
    why = ""
    if rounds < options.rounds:
        why = f"the run has --rounds {options.rounds}, which can only grow"
    elif rounds > options.rounds and (cause := fixed_rounds(options)):
        why = (
            f"rounds cannot be added to a run with {cause}: with --rounds {rounds} its earlier rounds would have been "
            "different"
        )
    elif (folder / SUMMARY).exists() and not Checkpoints(folder / FOLDER).rounds():
        why = "rounds are added from the last checkpoint, and there is none: give runs --keep-state always"
    if why:
        raise InvalidInput(f"--resume {folder}: {why}")


def spec_of(
    config: dict[str, Any], folder: Path, prefix: str = "--resume ", *, named: Mapping[str, str] | None = None
) -> Spec:
    """Run from a stored configuration, checked as if its values were given.

    Args:
      config, folder: the configuration, and the folder of its run.
      prefix: start of an error message, before the folder.
      named: values of options in CODE that the command itself gives: their files replace the folder's.

    Raises:
      InvalidInput: the configuration was edited, or one of the user's own files has changed or is not named.
    """
    named = named or {}
    with errors_of_config(folder, prefix):
        values = stored_options(config) | config["hyper_parameters"] | _NOT_STORED
        entries = config.get("own_code", {})
        own = [kind for kind in CODE if is_own(values.get(kind))]
        if bare := [kind for kind in own if kind not in entries]:
            raise InvalidInput(f"it names {values[bare[0]]} as {flag(bare[0])}, without the digest of its text")
        if missing := [kind for kind in own if kind not in named]:
            words = [f"{flag(kind)} {entries[kind]['file']}:{values[kind].rpartition(':')[2]}" for kind in missing]
            raise CodeNotNamed(
                "the run has code of your own, which is executed only where you name it: read it, then add "
                f"{' '.join(words)} (load_run: {', '.join(f'{kind}=...' for kind in missing)})"
            )
        for kind, entry in entries.items():
            if kind not in CODE:
                check_unchanged(kind, entry)
                values[kind] = entry["file"]
        for kind in own:
            values[kind] = named[kind]
            if is_own(named[kind]):
                check_unchanged(kind, entries[kind] | {"file": str(path_of(named[kind]))})
        if values["epochs"] is None:
            # --local-steps replaces them.
            del values["epochs"]
        return dataclasses.replace(Spec.of(config["dataset"], **values), given=frozenset(config["given"]))


class CodeNotNamed(InvalidInput):
    """Error of a run with the user's own files, which the command does not name."""


@contextlib.contextmanager
def errors_of_config(folder: Path, prefix: str = "--resume ") -> Iterator[None]:
    """Context that names the configuration in errors about it."""
    try:
        yield
    except CodeNotNamed as error:
        raise InvalidInput(f"{prefix}{folder}: {error}") from None
    except InvalidInput as error:
        raise InvalidInput(f"{prefix}{folder}: {CONFIG} cannot be used: {error}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidInput(
            f"{prefix}{folder}: {CONFIG} is not a configuration of a run ({type(error).__name__}: {error})"
        ) from None


def add_rounds(folder: RunFolder, experiment: Experiment, done: int, notify: Callable[[str], None]) -> None:
    """Write a larger number of rounds into a run's configuration; the summary of its earlier end is removed."""
    config, rounds = read_config(folder.path), experiment.settings.rounds
    if config["options"]["rounds"] == rounds:
        return
    if (folder.path / SUMMARY).exists():
        # The summary no longer fits the log, which has been cut off after the checkpoint.
        last = read_json(folder.path / SUMMARY).get("rounds_done", 0)
        if done < last:
            notify(f"The last checkpoint is of round {done}: rounds {done + 1} to {last} are trained again.")
    # Remove the summary first: without it, the run is unfinished.
    (folder.path / SUMMARY).unlink(missing_ok=True)
    more = {"options": config["options"] | {"rounds": rounds}, "given": sorted({*config["given"], "rounds"})}
    folder.write(CONFIG, config | more | privacy_record(experiment, rounds))


def record_code(folder: RunFolder, notify: Callable[[str], None]) -> None:
    """Write into a run's configuration that today's code continues it, unless this code is listed there."""
    config = read_config(folder.path)
    known, today = versions_behind(config), code_version(config["options"]["method"])
    if today not in known:
        config |= {RESUMED_BY: [*known[1:], today]}
        folder.write(CONFIG, config)
    if note := note_on_code(config):
        notify(f"Note: {note} in {folder.path / CONFIG}.")


def check_data(folder: Path, description: str) -> None:
    """Raise InvalidInput if the data differs from the data the run was started with."""
    began = read_config(folder)["data"]["description"]
    if began != description:
        raise InvalidInput(f"the run in {folder} began on {began}, which is {description} now; give --data-dir")
