"""Whether runs that are killed and resumed end as the uninterrupted ones, bit for bit. A tool, not a test:

    python tests/support/kills.py --out kills.jsonl --kills 100

Starts one small command after another, kills it with SIGKILL up to five times, at a moment of its work on files (half
of a line is written, a file is about to be renamed, ...) or at any time, resumes it, lets it end, and compares its
folder with that of the uninterrupted command but for times. Results are appended to the file as they come; a second
call goes on where the first one ended. The commands' folders are beside the file, with the ending .work. Ends with the
figures, and with exit code 1 if a folder differed. The commands run in children that are forked once everything is
imported: nothing here may compute with JAX before that, whose threads do not survive a fork.
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

SCENES = {
    "a run": f"digits {RUN} --out run",
    "a table": f"tables {TABLE} --out run",
    "states on disk": f"digits {RUN} --state-on disk --out run",
    "a sweep": f"sweep --dataset digits --method fedper {SMALL} --seeds 2 --out run",
    "states on the host": f"digits {RUN} --state-on host --out run",
}
"""Name -> command that writes into the folder `run`; after a kill a run is resumed, the others are given again."""

LONGEST = 120
"""Seconds after which a child counts as stuck."""


def _import() -> None:
    """Import all that the commands need, start no thread, and spare the children tracing that no file depends on."""
    import matplotlib.figure  # noqa: F401
    import sklearn.datasets  # noqa: F401

    import experiments.run.run
    import experiments.run.together
    import experiments.show.pictures
    import experiments.sweep.__main__
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
        from experiments.cli.command import main

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
    """Run a command in a forked child whose current folder is `here`, with this cache of compiled programs."""
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
    seconds, moments = time.monotonic() - began, {}
    assert seconds < LONGEST, f"{words} takes more than {LONGEST} s: {output.read_text()}"
    with contextlib.suppress(FileNotFoundError):
        moments = json.loads(found.read_text())
    return Ended(os.waitstatus_to_exitcode(ended[1]), seconds, moments, output.read_text())


def results(folder: Path) -> dict[str, object]:
    """All that a command's folder has, by path, without times; of checkpoints the state of the last one."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.name == "checkpoints":
            last = max(path.glob("0-of-1/[0-9]*.npz"), key=lambda one: int(one.stem))
            with zipfile.ZipFile(last) as arrays:
                checked = [one for one in arrays.infolist() if one.filename.startswith("state.")]
            found[name] = last.name, [(one.filename, one.CRC) for one in checked]
        elif path.is_file() and not {"checkpoints", "groups"} & set(path.relative_to(folder).parts):
            found[name] = _content(path)
    return found


def _content(path: Path) -> object:
    if path.suffix in (".json", ".jsonl"):
        text = path.read_text()
        return _timeless([json.loads(one) for one in ([text] if path.suffix == ".json" else text.splitlines())])
    return path.read_bytes()


def _timeless(value):
    if isinstance(value, dict):
        return {k: _timeless(v) for k, v in value.items() if "second" not in k and k != "digests"}
    return [_timeless(one) for one in value] if isinstance(value, list) else value


def uninterrupted(name: str, work: Path) -> tuple[Ended, dict[str, object]]:
    """How a scene ends by itself, once its programs are compiled, and its results."""
    for _ in range(1 if (work / "compiled").exists() else 2):
        shutil.rmtree(work / "whole", ignore_errors=True)
        (work / "whole").mkdir(parents=True)
        ended = run(SCENES[name], work / "whole", work / "compiled")
        assert ended.code == 0, ended.said
    return ended, results(work / "whole" / "run")


def _kill(draw: random.Random, whole: Ended) -> Kill:
    if draw.random() < 0.35:
        return Kill(seconds=draw.uniform(0.0, whole.seconds))
    moment = draw.choice(sorted(whole.moments))
    return Kill(moment, draw.randint(1, whole.moments[moment]))


def chain(number: int, seed: int, name: str, whole: Ended, wanted: dict[str, object], work: Path) -> dict[str, object]:
    """Kill a scene up to five times, let it end, and compare it with the uninterrupted one.

    Number and seed decide when it is killed; every eighth chain begins without compiled programs.
    """
    draw, here, is_run = random.Random(f"{seed} {number}"), work / "here", SCENES[name].startswith("digits")
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir()
    cache, folder = here / "cache" if number % 8 == 7 else work / "compiled", here / "run"
    plans = [_kill(draw, whole) for _ in range(draw.randint(2, 5))]
    if cache.parent == here:
        plans[0] = Kill("half of a compiled program is written", draw.randint(1, 20))
    kills, anew, began, is_finished = [], 0, time.monotonic(), False
    while not is_finished:
        resumed = "digits --resume run" if is_run else SCENES[name]
        if is_run and (folder / "metrics.jsonl").exists() and not (folder / "config.json").exists():
            refused = run(resumed, here, cache)
            assert refused.code == 2, refused.said
            assert "remove the folder, and start it again" in refused.said, refused.said
            shutil.rmtree(folder)
            anew += 1
        words = resumed if (folder / "config.json").exists() else SCENES[name]
        kill = plans.pop(0) if plans else None
        ended = run(words, here, cache, kill)
        if ended.code == -signal.SIGKILL:
            kills.append(str(kill))
            is_finished = is_run and (folder / "summary.json").exists()
        else:
            is_finished = True
            assert ended.code == 0, f"after {kills}: {ended.said}"
    found = results(folder)
    names = [name for name in sorted(found | wanted) if found.get(name) != wanted.get(name)]
    record = {"scene": name, "kills": kills, "anew": anew, "differs": names}
    return record | {"seconds": round(time.monotonic() - began, 2)}


def figures(records: list[dict]) -> str:
    """The figures of all chains in words, and a table of the moments."""
    lines = []
    for name in ("all", *SCENES):
        of = [one for one in records if name in ("all", one["scene"])]
        kills, equal = sum(len(one["kills"]) for one in of), sum(not one["differs"] for one in of)
        anew = sum(one["anew"] for one in of)
        lines.append(f"{name}: {kills} kills in {len(of)} chains, {equal} bit-equal, {anew} begun anew")
    moments = collections.Counter(moment for one in records for moment in one["kills"])
    lines += [f"{count:4d}  {moment}" for moment, count in moments.most_common()]
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
    wholes = {}
    while sum(len(one["kills"]) for one in records) < words.kills:
        name = words.scene or list(SCENES)[len(records) % len(SCENES)]
        work = words.out.absolute().with_suffix(".work") / str(list(SCENES).index(name))
        if name not in wholes:
            wholes[name] = uninterrupted(name, work)
        records.append(chain(len(records), words.seed, name, *wholes[name], work))
        with words.out.open("a") as file:
            file.write(json.dumps(records[-1]) + "\n")
        print(json.dumps(records[-1]), flush=True)
    print(figures(records))
    return int(any(one["differs"] for one in records))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    # OpenBLAS starts threads when NumPy is imported; without most optimizations compiling takes half the time.
    os.environ |= {"JAX_PLATFORMS": "cpu", "OPENBLAS_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    sys.exit(main())
