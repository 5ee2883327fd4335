"""Whether runs that are killed and resumed end as the uninterrupted ones, bit for bit. A tool, not a test:

    python tests/support/kills.py --out kills.jsonl --kills 100

Starts one small command after another, kills it with SIGKILL, resumes it, kills it again, up to five times, lets it
end, and compares its folder with that of the uninterrupted command: all metrics, summaries and tables but their times,
the CRC-32 of all arrays of the final states, and which files there are. It is killed at a moment of its work on files
(half of a line is written, a file is about to be renamed, ...) or at any time. Results are appended to the file as they
come; a second call goes on where the first one ended. The commands' folders are in one beside the file, with the ending
.work. Ends with the figures, and with exit code 1 if a folder differed.

The commands run in children that are forked from this process once everything is imported. Nothing here may compute
with JAX before that: its threads do not survive a fork.
"""

import argparse
import collections
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
import zipfile
from pathlib import Path
from typing import NamedTuple

from moments import Kill, Moments

ROOT = Path(__file__).resolve().parents[2]

SMALL = "--num-clients 4 --train-size 20 --test-size 10 --batch-size 10 --rounds 3 --eval-every 1 --checkpoint-every 1"
SMALL += " --epochs 1 --keep-state always --devices 1"
RUN = f"--method fedper --participation 0.5 --drop-rate 0.3 --held-out-clients 1 {SMALL}"
TABLE = "--paper fedpac --table 1 --dataset fashion_mnist --clients 20 --method fedavg local --source embedded"
TABLE += " --model mlp --hidden 8 --train-size 20 --test-size 10 --rounds 3 --epochs 1 --eval-every 1"
TABLE += " --checkpoint-every 1 --keep-state always --devices 1"

LONGEST = 120
"""Seconds after which a child counts as stuck."""


class Scene(NamedTuple):
    """A command that is killed.

    Attributes:
      words: its command line.
      resumed: command line after a kill.
    """

    words: str
    resumed: str


SCENES = {
    "a run": Scene(f"digits {RUN} --out run", "digits --resume run"),
    "states on the host": Scene(f"digits {RUN} --state-on host --out run", "digits --resume run"),
    "states on disk": Scene(f"digits {RUN} --state-on disk --out run", "digits --resume run"),
    "a sweep": Scene(*[f"sweep --dataset digits --method fedper {SMALL} --seeds 2 --out run"] * 2),
    "a table": Scene(*[f"tables {TABLE} --out run"] * 2),
}
"""Name -> command; all of them write into the folder `run`."""

ORDER = ["a run", "states on the host", "a table", "states on disk", "a sweep", "a run", "states on disk"]
"""Scenes of consecutive chains of kills."""


def _import() -> None:
    """Import all that the commands need, start no thread, and spare the children tracing that no file depends on."""
    import matplotlib.figure  # noqa: F401
    import sklearn.datasets  # noqa: F401

    import experiments.run.run
    import experiments.show.pictures
    import experiments.sweep.__main__
    import experiments.sweep.execute
    import experiments.sweep.results
    import experiments.tables.__main__  # noqa: F401
    from experiments.run.build import Experiment
    from pfl_jax import tasks
    from pfl_jax.engine.communication import Traffic

    Experiment.traffic = Traffic(80, 80)
    tasks.macro_f1 = tasks.macro_auc = lambda *_: tasks.jnp.float32(0)


def _command(words: str) -> int:
    name, *words = words.split()
    if name == "digits":
        from experiments.run.command import main

        return main(name, words)
    module = __import__(f"experiments.{name}.__main__", fromlist=["main"])
    return module.main(words)


class Ended(NamedTuple):
    """How a child ended: its exit code, -9 after a kill; its seconds; the moments that it had; and what it said."""

    code: int
    seconds: float
    moments: dict[str, int]
    said: str


def run(words: str, here: Path, cache: Path, kill: Kill | None = None) -> Ended:
    """Run a command in a forked child.

    Args:
      words: the command.
      here: its current folder.
      cache: of compiled programs.
      kill: when it is killed.

    Raises:
      TimeoutError: it takes too long.
    """
    found, output, began = here / "moments.json", here / "output", time.monotonic()
    found.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        code = 70
        try:
            os.chdir(here)
            file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, 1)
            os.dup2(file, 2)
            os.environ["PFL_JAX_CACHE"] = str(cache)
            moments = Moments(here if cache.parent == here else here / "run", kill)
            moments.watch()
            code = _command(words)
            found.write_text(json.dumps(moments.found))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    until = began + (LONGEST if kill is None or kill.moment else kill.seconds)
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            ended = os.waitpid(child, 0)
            break
        time.sleep(0.01)
    seconds, code = time.monotonic() - began, os.waitstatus_to_exitcode(ended[1])
    if seconds > LONGEST:
        raise TimeoutError(f"{words} takes more than {LONGEST} s: {output.read_text()}")
    with contextlib.suppress(FileNotFoundError):
        return Ended(code, seconds, json.loads(found.read_text()), output.read_text())
    return Ended(code, seconds, {}, output.read_text())


def results(folder: Path) -> dict[str, object]:
    """All that a command's folder has, by path, without times; of checkpoints the state of the last one."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.name == "checkpoints":
            last = max(path.glob("0-of-1/[0-9]*.npz"), key=lambda one: int(one.stem))
            with zipfile.ZipFile(last) as arrays:
                # Of rows on disk their digests; in which planes they are depends on where the run was killed.
                checked = [one for one in arrays.infolist() if one.filename.startswith(("state.", "digests"))]
            found[name] = last.name, [(one.filename, one.CRC) for one in checked]
        elif path.is_file() and not {"checkpoints", "groups"} & set(path.relative_to(folder).parts):
            found[name] = _content(path)
    return found


def _content(path: Path) -> object:
    if path.name == "metrics.jsonl":
        return [_timeless(json.loads(line)) for line in path.read_text().splitlines()]
    if path.suffix == ".json":
        return _timeless(json.loads(path.read_text()))
    if path.name == "clients.rows":
        # The rows that count have their digests in the checkpoint.
        return None
    return path.read_bytes()


def _timeless(value):
    if isinstance(value, dict):
        return {k: _timeless(v) for k, v in value.items() if "second" not in k and k != "digests"}
    return [_timeless(one) for one in value] if isinstance(value, list) else value


class Whole(NamedTuple):
    """An uninterrupted command: its results, its moments, and its seconds once its programs are compiled."""

    results: dict[str, object]
    moments: dict[str, int]
    seconds: float


def uninterrupted(name: str, work: Path) -> Whole:
    """Run a scene to its end, twice if the first time compiles."""
    for _ in range(1 if (work / "compiled").exists() else 2):
        here = work / "whole"
        shutil.rmtree(here, ignore_errors=True)
        here.mkdir()
        ended = run(SCENES[name].words, here, work / "compiled")
        assert ended.code == 0, ended.said
    return Whole(results(here / "run"), ended.moments, ended.seconds)


def _kill(draw: random.Random, whole: Whole, *, compiles: bool) -> Kill:
    if compiles:
        return Kill("half of a compiled program is written", draw.randint(1, 20))
    if draw.random() < 0.35:
        return Kill(seconds=draw.uniform(0.0, whole.seconds))
    moment = draw.choice(sorted(whole.moments))
    number = draw.randint(1, whole.moments[moment])
    return Kill(moment, number)


def chain(number: int, seed: int, whole: Whole, name: str, work: Path) -> dict[str, object]:
    """Kill a scene up to five times, let it end, and compare it with the uninterrupted one.

    Args:
      number, seed: decide when it is killed.
      whole, name: the scene.
      work: folder with the compiled programs; every eighth chain begins without any.
    """
    draw, scene, here = random.Random(f"{seed} {number}"), SCENES[name], work / "here"
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir()
    compiles = number % 8 == 7
    cache = here / "cache" if compiles else work / "compiled"
    kills, anew, began, plans = [], 0, time.monotonic(), draw.randint(2, 5)
    while True:
        kill = _kill(draw, whole, compiles=compiles and not kills) if plans > 0 else None
        plans -= 1
        alone, folder = scene.resumed != scene.words, here / "run"
        if alone and (folder / "metrics.jsonl").exists() and not (folder / "config.json").exists():
            refused = run(scene.resumed, here, cache)
            assert refused.code == 2, refused.said
            assert "remove the folder, and start it again" in refused.said, refused.said
            shutil.rmtree(folder)
            anew += 1
        ended = run(scene.resumed if (folder / "config.json").exists() else scene.words, here, cache, kill)
        if ended.code == -signal.SIGKILL:
            kills.append(str(kill))
            finished = alone and (folder / "summary.json").exists()
        else:
            finished = True
            assert ended.code == 0, f"after {kills}: {ended.said}"
        if finished:
            break
    found = results(folder)
    names = [name for name in sorted(found | whole.results) if found.get(name) != whole.results.get(name)]
    record = {"scene": name, "kills": kills, "anew": anew, "differs": names}
    return record | {"seconds": round(time.monotonic() - began, 2)}


def figures(records: list[dict]) -> str:
    """The figures of all chains in words, and a table of the moments."""
    lines, kills = [], sum(len(one["kills"]) for one in records)
    equal = sum(not one["differs"] for one in records)
    lines.append(f"{kills} kills in {len(records)} chains; {equal} of {len(records)} ended bit-equal")
    for name in SCENES:
        of = [one for one in records if one["scene"] == name]
        if of:
            said = f"{name}: {sum(len(one['kills']) for one in of)} kills in {len(of)} chains"
            lines.append(
                f"{said}, {sum(not one['differs'] for one in of)} bit-equal, {sum(o['anew'] for o in of)} anew"
            )
    moments = collections.Counter(moment for one in records for moment in one["kills"])
    lines += [
        f"{count:4d}  {moment}" for moment, count in sorted(moments.items(), key=lambda pair: (-pair[1], pair[0]))
    ]
    lines += [f"DIFFERS: {one['scene']} after {one['kills']}: {one['differs']}" for one in records if one["differs"]]
    return "\n".join(lines)


def main() -> int:
    """Kill until there are enough kills, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="results, a line for each chain of kills")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scene", choices=list(SCENES), help="only this command; by default all, in turn")
    words = parser.parse_args()
    records = [json.loads(line) for line in words.out.read_text().splitlines()] if words.out.exists() else []
    _import()
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads: a fork would not have them"
    wholes: dict[str, Whole] = {}
    while sum(len(one["kills"]) for one in records) < words.kills:
        name = words.scene or ORDER[len(records) % len(ORDER)]
        work = words.out.absolute().with_suffix(".work") / str(list(SCENES).index(name))
        if name not in wholes:
            work.mkdir(parents=True, exist_ok=True)
            wholes[name] = uninterrupted(name, work)
        records.append(chain(len(records), words.seed, wholes[name], name, work))
        with words.out.open("a") as file:
            file.write(json.dumps(records[-1]) + "\n")
        print(json.dumps(records[-1]), flush=True)
    print(figures(records))
    return int(any(one["differs"] for one in records))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    # OpenBLAS starts threads when NumPy is imported.
    os.environ |= {"JAX_PLATFORMS": "cpu", "OPENBLAS_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    # Half the time to compile.
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main())
