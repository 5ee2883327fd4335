"""Folders that commands refuse, those of runs among them."""

import fcntl
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from bad_input import HELD, Case, Prepare, experiment_of, file, folder, save_checkpoint, write
from run_folders import SMALL, write_run

Row = tuple[str, Prepare, str]
"""Command, what makes the state of the files that it meets, and part of the message."""


def _folders() -> list[Row]:
    not_empty = "is not empty: give --out a new one"
    return [
        ("digits --out mine", file("mine/thesis.tex"), f"the folder mine {not_empty}"),
        ("digits --out table", file("table/.lock"), f"the folder table {not_empty}"),
        ("digits --out file/run", file("file"), "give a folder that can be written"),
        ("digits --out loop/run", loop("loop"), "Too many levels of symbolic links"),
    ]


def _checkpoints() -> list[Row]:
    resume, more, other = "digits --resume run", "digits --resume run --rounds 8", "run/checkpoints are of another run"
    finished, cosine = file("run/summary.json", b"{}"), edit("options", schedule=["lr=cosine"])
    last = edit("options", full_last_round=True, participation=0.5)
    return [
        (resume, finished, "its results are in run/summary.json"),
        (more, _finished_without_checkpoint, "rounds are added from the last checkpoint, and there is none"),
        (more, cosine, "cannot be added to a run with --schedule lr=cosine"),
        (more, last, "cannot be added to a run with --full-last-round"),
        (resume, file("run/config.json", b'{"dataset": "dig'), "with its folder if it is a run's"),
        (resume, edit("options", rounds=-3), "config.json cannot be used: --rounds must be at least 1"),
        (resume, edit("hyper_parameters", lr=0.5), other),
        (resume, gone("run/config.json"), "a run was killed at its start"),
        (resume, gone("run/metrics.jsonl"), "--resume run: metrics.jsonl is missing"),
        (resume, _damage, "no checkpoint in run/checkpoints can be read"),
        (resume, _other_shapes, "the checkpoint of round 1 in run/checkpoints is of another"),
        (resume, hold("run/metrics.jsonl"), "another process is at work in run: wait for it"),
        (resume, _lost_method, "the run has code of your own, which is executed only where you name it"),
    ]


def _export() -> list[Row]:
    to = "export run --to model.msgpack"
    return [
        (to, lambda here: (_finished(here), _damage(here)), "no checkpoint in run/checkpoints can be read"),
        ("export run --client 4 --to model.msgpack", _finished, "there is no client 4: the run has clients 0 to 3"),
        (to, file("model.msgpack"), "--to model.msgpack exists already: give another name, or remove it"),
    ]


def _report() -> list[Row]:
    def two(here: Path) -> None:
        for name in "ab":
            write_run(here / "other" / name, description=name)

    def one(here: Path) -> None:
        write_run(here / "other")

    def another(here: Path) -> None:
        write(here / "other/config.json", b'{"dataset": "digits", "options": {"method": "fedpac"}}')
        write(here / "other/metrics.jsonl", b"")

    before = "report other --eval-protocol before_aggregation"
    return [
        ("report other", folder("other"), "there is no run in other"),
        ("report other", another, "other/config.json is not the configuration of a run"),
        ("report other --out missing/r.html", one, "cannot write missing/r.html"),
        (before, one, "none of the runs has been evaluated by it"),
        ("report other --client 99", one, "--client 99: the clients of"),
        ("compare other", one, "a comparison needs finished runs of two settings at least"),
        ("report other --plot x.png", two, "runs with different data are not drawn together"),
    ]


def _many() -> list[Row]:
    table = "tables --paper fedpac --table 5 --dataset fashion_mnist --out table"
    other, cut = b'{"paper": "fedas", "table": 2}', b'{"pap'

    def stateless(here: Path) -> None:
        write_run(here / "many/runs/seed-0")

    return [
        (f"sweep --dataset digits {' '.join(SMALL)} --keep-state always --out many", stateless, "which kept no state"),
        (table, file("table/table.json", other), "which is never overwritten"),
        (table, file("table/table.json", cut), "with its folder if it is a run's"),
        (table, hold("table/.lock"), "another process is at work in table"),
    ]


def cases() -> Iterator[Case]:
    """All of them."""
    for part in (_folders, _checkpoints, _export, _report, _many):
        for command, prepare, message in part():
            yield Case(command, message, message, prepare)


# What makes them


def edit(part: str, **values: object) -> Prepare:
    """Changes values in a run's config.json."""

    def apply(here: Path) -> None:
        path = here / "run/config.json"
        config = json.loads(path.read_text())
        config[part] = config.get(part, {}) | values
        path.write_text(json.dumps(config))

    return apply


def _finished(here: Path) -> None:
    write(here / "run/summary.json", b'{"method": "local", "rounds_done": 1}')


def _finished_without_checkpoint(here: Path) -> None:
    _finished(here)
    shutil.rmtree(here / "run/checkpoints")


def _damage(here: Path) -> None:
    path = here / "run/checkpoints/0-of-1/1.npz"
    path.write_bytes(path.read_bytes().replace(b"float32", b"float64"))


def _other_shapes(here: Path) -> None:
    """A checkpoint of the same options whose arrays are not the same, as another version might have written it."""
    import jax

    run = here / "run"
    experiment, state = experiment_of(run)
    shutil.rmtree(run / "checkpoints")
    save_checkpoint(experiment, state._replace(clients=jax.tree.map(lambda leaf: leaf[:3], state.clients)), run)


def _lost_method(here: Path) -> None:
    """As of a run with a method of the user's own, whose file is gone."""
    edit("options", method="mine.py:mine")(here)
    edit("own_code", method={"file": str(here / "run/mine.py"), "digest": "0123456789ab"})(here)


def gone(name: str) -> Prepare:
    """Removes a file."""
    return lambda here: (here / name).unlink()


def loop(name: str) -> Prepare:
    """Makes a link to itself."""

    def apply(here: Path) -> None:
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).symlink_to((here / name).name)

    return apply


def hold(name: str) -> Prepare:
    """As another process would hold a file: until the answer."""

    def apply(here: Path) -> None:
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        HELD.append((here / name).open("a"))
        fcntl.flock(HELD[-1], fcntl.LOCK_EX)

    return apply
