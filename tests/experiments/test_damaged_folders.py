"""A damaged file of a run's folder is one line or does no harm: no command hangs, and none gives other numbers."""

import dataclasses
import io
import json
import shutil
from types import SimpleNamespace

import pytest
from bad_input import RUN, experiment_of, untrained
from damage import DAMAGES, limit
from rich.console import Console

from experiments.cli.command import main, parse
from experiments.folder import stored_runs
from experiments.folder.run_folder import RunFolder
from experiments.run import build, records, resume, run
from experiments.run.build import Experiment
from experiments.run.rounds import ActiveRun
from pfl_jax import InvalidInput, simulate
from pfl_jax.engine.checkpoint import Checkpoints
from pfl_jax.engine.communication import Traffic

SHORT = [*RUN.split(), "--eval-every", "1"]
WORDS = [*SHORT, "--checkpoint-every", "1", "--keep-checkpoints", "3", "--keep-state", "always", "--devices", "1"]
CELL = parse("digits", SHORT)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return experiment_of(tmp_path_factory.mktemp("made") / "run")


@pytest.fixture(scope="module")
def folders(built, tmp_path_factory):
    """Folders of a run with results but without training: it finished, and it was killed after two of three rounds."""
    made, state = built
    make = tmp_path_factory.mktemp("quick")
    whole, part = make / "whole", make / "part"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulate, "run", untrained(state))
        patch.setattr(build, "build_experiment", lambda request, *_: dataclasses.replace(made, spec=request))
        # Counting bytes traces the method.
        patch.setattr(Experiment, "traffic", Traffic(80, 80))
        assert main("digits", [*WORDS, "--out", str(whole)]) == 0
    shutil.copytree(whole, part)
    (part / "summary.json").unlink()
    (part / "checkpoints/0-of-1/3.npz").unlink()
    # As if it had been killed while it wrote the next line.
    lines = (part / "metrics.jsonl").read_text().splitlines(keepends=True)
    (part / "metrics.jsonl").write_text("".join(lines[:2]) + lines[2][:40])
    return whole, part


@pytest.fixture
def damaged(folders, tmp_path):
    """Copies the finished or the killed run, and damages a file of the copy."""

    def copy(which, name, damage):
        folder = tmp_path / "run"
        shutil.copytree(folders[which], folder)
        files = sorted(path for path in folder.glob(name) if path.is_file())
        DAMAGES[damage](files[len(files) // 2])
        return folder

    return copy


def verdict(call):
    """Result of a call, or the one line that it refuses with, within a minute."""
    with limit(60):
        try:
            return call()
        except InvalidInput as error:
            text = str(error)
    assert "\n" not in text
    return text


def numbers(run):
    return json.dumps([run.setting, run.lines, run.summary], default=str)


@pytest.fixture(scope="module")
def undamaged(folders):
    """What a report and a sweep have of the finished run."""
    return numbers(stored_runs.read(folders[0])), run.run_cell(CELL, folders[0], Console())


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "summary.json"])
def test_a_finished_run_is_read_as_it_was_or_not_at_all(undamaged, damaged, name, damage):
    want, folder = undamaged, damaged(0, name, damage)
    told = verdict(lambda: numbers(stored_runs.read(folder)))
    # Without its summary it counts as unfinished, and a sweep would make it again.
    if told != want[0] and not (name == "summary.json" and damage in ("gone", "a symlink loop")):
        assert str(folder) in told
    if not (name == "summary.json" and damage in ("gone", "a symlink loop")):
        found = verdict(lambda: run.run_cell(CELL, folder, Console(file=io.StringIO())))
        assert found == want[1] or str(folder) in found


@pytest.fixture(scope="module")
def asked():
    """Command line that resumes a run."""
    return parse("digits", ["--resume", "run"])


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl"])
def test_an_unfinished_run_goes_on_as_it_was_or_not_at_all(asked, built, folders, damaged, name, damage):
    like = built[1]

    def goes_on(folder):
        resumed = resume.resumed(dataclasses.replace(asked, resume=str(folder)))
        ActiveRun(SimpleNamespace(spec=asked), RunFolder(folder)).restore(record)
        log = (folder / "metrics.jsonl").read_bytes()
        return dataclasses.replace(resumed, resume=None, out=None), log

    record = Checkpoints(folders[1] / "checkpoints").newest(like).record
    content = b"".join((folders[1] / "metrics.jsonl").read_bytes().splitlines(keepends=True)[:2])
    folder = damaged(1, name, damage)
    found = verdict(lambda: goes_on(folder))
    if isinstance(found, str):
        assert str(folder) in found
        return
    if name == "config.json":
        # What a flipped byte has made of it is another run's options, which its checkpoints refuse.
        assert damage == "a byte is another"
    else:
        assert found[1] == content


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over(experiment, damaged, damage):
    like, own = experiment
    folder = damaged(1, "checkpoints/0-of-1/2.npz", damage)

    def newest():
        return Checkpoints(folder / "checkpoints").newest(like, check)

    def check(record):
        records.check_identity(record, own, folder, lambda text: None)

    # What follows the end of an archive changes none of its arrays.
    harmless = damage == "longer"
    assert int(verdict(newest).state.round) == (2 if harmless else 1)
    DAMAGES["cut off"](folder / "checkpoints/0-of-1/1.npz")
    assert harmless or "no checkpoint in" in verdict(newest)


@pytest.fixture(scope="module")
def experiment(built, folders):
    request = resume.spec_of(json.loads((folders[0] / "config.json").read_text()), folders[0])
    return built[1], dataclasses.replace(built[0], spec=request)
