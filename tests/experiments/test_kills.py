"""Commands that are killed at bad moments and resumed end as the uninterrupted ones, bit for bit but for times."""

import builtins
import collections
import contextlib
import importlib
import io
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import zipfile
from pathlib import Path

import pytest

SMALL = "--num-clients 4 --train-size 20 --test-size 10 --batch-size 10 --rounds 3 --eval-every 1 --checkpoint-every 1"
SMALL += " --epochs 1 --keep-state always --devices 1"
RUN = f"--method fedper --participation 0.5 --drop-rate 0.3 --held-out-clients 1 {SMALL}"
TABLE = "--paper fedpac --table 1 --dataset fashion_mnist --clients 20 --method fedavg local --source embedded"
TABLE += " --model mlp --hidden 8 --train-size 20 --test-size 10 --rounds 3 --epochs 1 --eval-every 1"
TABLE += " --checkpoint-every 1 --keep-state always --devices 1"

SCENES = {
    "a run": f"digits {RUN} --out run",
    "a table": f"tables {TABLE} --out run",
    "states on disk": f"digits {RUN} --state-on disk --out run",
    "a sweep": f"sweep --dataset digits --method fedper {SMALL} --seeds 2 --out run",
    "states on the host": f"digits {RUN} --state-on host --out run",
}
"""Name -> command that writes into the folder `run`; after a kill a run is resumed, the others are given again."""

LONGEST = 240.0
"""Seconds after which a command counts as stuck."""

EVENTS = {"os.rename": 1, "os.mkdir": 0, "os.remove": 0, "shutil.rmtree": 0}
"""Audited changes of files, and which argument is the path."""


class HalfWritten:
    """An open file of which every write has a moment after its first half."""

    def __init__(self, file, moment):
        self.file, self.moment = file, moment

    def write(self, content):
        half = len(content) // 2
        self.file.write(content[:half])
        self.file.flush()
        self.moment()
        return half + self.file.write(content[half:])

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()

    def __getattr__(self, name):
        return getattr(self.file, name)


def watch(folder, kill):
    """Counts the moments at which this process changes files below a folder, and kills it at one of them, if any."""
    moments, usual = collections.Counter(), io.open

    def is_mine(path):
        return isinstance(path, str | Path) and os.path.abspath(path).startswith(str(folder))

    def happens(what, path):
        moment = f"{what} {Path(path).suffix or 'of another file'}"
        moments[moment] += 1
        if kill == (moment, moments[moment]):
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event, arguments):
        if event in EVENTS and is_mine(path := arguments[EVENTS[event]]):
            happens(event, path)

    def opened(path, mode="r", *arguments, **options):
        file = usual(path, mode, *arguments, **options)
        if mode.startswith("r") or not is_mine(path):
            return file
        return HalfWritten(file, lambda: happens("half of a write", path))

    sys.addaudithook(audit)
    io.open = builtins.open = opened  # Path.open has the one, JAX the other.
    return moments


def command(words, here, cache, kill):
    """What the child does: the command in the folder `here`; it leaves the moments that it had in a file."""
    os.chdir(here)
    os.environ["PFL_JAX_CACHE"] = str(cache)
    moments = watch(here if cache.parent == here else here / "run", kill)
    name, *rest = words.split()
    with open("output", "w") as output, contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        if name == "digits":
            from experiments.cli.command import main

            code = main(name, rest)
        else:
            code = importlib.import_module(f"experiments.{name}").main(rest)
    Path("moments.json").write_text(json.dumps(moments))
    sys.exit(code)


# Children are forked from a process that has imported everything and computed nothing.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["experiments.cli.command", "experiments.sweep", "experiments.tables", "experiments.run.run"]
)


def run(words, here, cache, kill=None, seconds=LONGEST):
    """Exit code of a command, -9 after a kill at a moment or after so many seconds, and what it said."""
    child = FORKS.Process(target=command, args=(words, here, cache, kill))
    child.start()
    child.join(seconds)
    if child.is_alive():
        assert seconds < LONGEST, f"{words} is stuck"
        child.kill()
        child.join()
    return child.exitcode, (here / "output").read_text() if (here / "output").exists() else ""


def timeless(value):
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if "second" not in k and k != "digests"}
    return [timeless(one) for one in value] if isinstance(value, list) else value


def results(folder):
    """All that a command's folder has, by path, without times; of checkpoints the state of the last one."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.name == "checkpoints":
            last = max(path.glob("0-of-1/[0-9]*.npz"), key=lambda one: int(one.stem))
            with zipfile.ZipFile(last) as arrays:
                checked = [one for one in arrays.infolist() if one.filename.startswith("state.")]
            found[name] = last.name, [(one.filename, one.CRC) for one in checked]
        elif path.is_file() and "checkpoints" not in path.relative_to(folder).parts:
            is_json = path.suffix in (".json", ".jsonl")
            lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_bytes()]
            found[name] = [timeless(json.loads(line)) for line in lines] if is_json else lines
    return found


@pytest.mark.slow
@pytest.mark.parametrize("scene", SCENES)
def test_killed_commands_end_as_uninterrupted_ones(scene, tmp_path):
    words, is_run, draw = SCENES[scene], SCENES[scene].startswith("digits"), random.Random(scene)
    whole, compiled = tmp_path / "whole", tmp_path / "compiled"
    whole.mkdir()
    assert run(words, whole, compiled)[0] == 0, (whole / "output").read_text()
    wanted, moments = results(whole / "run"), json.loads((whole / "moments.json").read_text())
    for number in range(2):
        here = tmp_path / str(number)
        here.mkdir()
        folder, cache = here / "run", here / "cache" if number else compiled
        kills = [(moment, draw.randint(1, moments[moment])) for moment in draw.sample(sorted(moments), 3)]
        killed, code = [], None
        while code != 0:
            if is_run and (folder / "metrics.jsonl").exists() and not (folder / "config.json").exists():
                code, said = run("digits --resume run", here, cache)
                assert (code, "remove the folder, and start it again" in said) == (2, True), said
                shutil.rmtree(folder)
            resumed = "digits --resume run" if is_run and (folder / "config.json").exists() else words
            if killed and is_run and (folder / "summary.json").exists():
                break
            kill = kills.pop() if kills else None
            # One of the kills is at any time.
            code, said = run(resumed, here, cache, kill, draw.uniform(1, 6) if len(kills) == 1 else LONGEST)
            killed += [kill] if code == -signal.SIGKILL else []
            assert code in (0, -signal.SIGKILL), f"after {killed}: {said}"
        assert killed, kills
        assert results(folder) == wanted, killed
