"""Folders that commands refuse, those of runs among them."""

import fcntl
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from bad_input import HELD, Case, Prepare, experiment_of, file, folder, save_checkpoint, write
from bad_own_code import SOUND
from run_folders import write_run


def _folders() -> Iterator[Case]:
    yield Case(
        "digits --out mine",
        "mine holds thesis.tex",
        "the folder mine is not empty: give --out a new one",
        file("mine/thesis.tex"),
    )
    yield Case("digits --out file/run", "file is a file", "give a folder that can be written", file("file"))
    yield Case("digits --out loop/run", "loop is a link to itself", "Too many levels of symbolic links", loop("loop"))
    yield Case(
        "digits --out table",
        "table is the folder of a table",
        "the folder table is not empty: give --out a new one",
        file("table/.lock"),
    )


def _checkpoints() -> Iterator[Case]:
    def of(what: str, message: str, change: Prepare, words: str = "") -> Case:
        return Case(f"digits --resume run{words}", what, message, lambda here: change(here / "run"))

    yield of("the run is finished", "its results are in run/summary.json", file("summary.json", b"{}"))
    yield of("the run is finished", "its results are in run/summary.json", file("summary.json", b"{}"), " --rounds 1")
    yield of(
        "the run is finished, without a checkpoint",
        "rounds are added to a finished run from its last checkpoint",
        _finished_without_checkpoint,
        " --rounds 9",
    )
    yield of("config.json is cut off", "with its folder if it is a run's", file("config.json", b'{"dataset": "dig'))
    yield of(
        "config.json edited: out of range",
        "config.json cannot be used: --rounds must be at least 1",
        edit("options", rounds=-3),
    )
    yield of(
        "config.json edited: another learning rate",
        "the checkpoints in run/checkpoints are of another run",
        edit("hyper_parameters", lr=0.5),
    )
    yield of(
        "its learning rate ends with it",
        "cannot be added to a run with --schedule lr=cosine",
        edit("options", schedule=["lr=cosine"]),
        " --rounds 8",
    )
    last = edit("options", full_last_round=True, participation=0.5)
    yield of("all take part in its last round", "cannot be added to a run with --full-last-round", last, " --rounds 8")
    yield of("it was killed before it had a config.json", "or was killed while it did", gone("config.json"))
    yield of("metrics.jsonl is gone", "--resume run: metrics.jsonl is missing", gone("metrics.jsonl"))
    yield of("a file of the checkpoint has other bytes", "no checkpoint in run/checkpoints can be read", _damage)
    yield of(
        "the checkpoint's arrays are of another shape",
        "the checkpoint of round 1 in run/checkpoints is of another",
        _other_shapes,
    )
    yield of(
        "another process is at work in it", "another process is at work in run: wait for it", hold("metrics.jsonl")
    )
    yield of(
        "the text of its own method has changed",
        "it has --method mine.py:mine, and the checkpoints local",
        _other_method,
    )
    yield of(
        "the file of its own method is gone",
        "config.json cannot be used",
        lambda run: (_other_method(run), (run / "mine.py").unlink()),
    )


def _finished_without_checkpoint(run: Path) -> None:
    write(run / "summary.json", b"{}")
    shutil.rmtree(run / "checkpoints")


def _export() -> Iterator[Case]:
    def of(what: str, message: str, words: str, change: Prepare) -> Case:
        return Case(f"export {words}", what, message, lambda here: change(here / "run"))

    finished = file("summary.json", b'{"method": "local", "rounds_done": 1}')
    to = "run --to model.msgpack"
    yield of(
        "its state has other bytes",
        "no checkpoint in run/checkpoints can be read",
        to,
        lambda run: (finished(run), _damage(run)),
    )
    four = "there is no client 4: the run has clients 0 to 3"
    yield of("it has four clients", four, "run --client 4 --to model.msgpack", finished)
    yield of(
        "model.msgpack is there",
        "--to model.msgpack is there already: give another name, or remove it",
        "run --to model.msgpack",
        lambda run: write(run.parent / "model.msgpack"),
    )


def _report() -> Iterator[Case]:
    yield Case(
        "report run --out page",
        "page is a file of another kind",
        "page is there already and not a report's page",
        file("page"),
    )
    yield Case("report other", "it is empty", "there is no run in other", folder("other"))
    config = b'{"dataset": "digits", "options": {"method": "fedpac"}}'
    files = {"config.json": config, "metrics.jsonl": b""}
    another = lambda here: [write(here / "other" / name, text) for name, text in files.items()]  # noqa: E731
    yield Case(
        "report other",
        "its configuration is another file",
        "other/config.json is not the configuration of a run",
        another,
    )
    one = lambda here: write_run(here / "other")  # noqa: E731
    yield Case("report other --out missing/r.html", "it is a run", "cannot write missing/r.html", one)
    protocol = "--eval-protocol before_aggregation"
    yield Case(f"report other {protocol}", "it is a run", "none of the runs has been evaluated by it", one)
    yield Case("report other --client 99", "it is a run", "--client 99: the clients of", one)
    yield Case("compare other", "it is a run", "a comparison needs finished runs of two settings at least", one)
    two = lambda here: [write_run(here / "other" / name, description=name) for name in "ab"]  # noqa: E731
    yield Case("report other --plot x.png", "runs on two kinds of data", "--plot draws one kind of data", two)


def _many() -> Iterator[Case]:
    table = "tables --paper fedpac --table 5 --dataset fashion_mnist"
    yield Case(
        f"{table} --out table",
        "table holds another table",
        "which is never overwritten",
        file("table/table.json", b'{"paper": "fedas", "table": 2}'),
    )
    yield Case(
        f"{table} --out table",
        "its table.json is cut off",
        "with its folder if it is a run's",
        file("table/table.json", b'{"pap'),
    )
    yield Case(
        f"{table} --out table",
        "another process is at work in it",
        "another process is at work in table",
        hold("table/.lock"),
    )
    sweep = "sweep --dataset digits --method local --no-compilation-cache --out table"
    runs = "table/groups/one/runs.json"
    yield Case(
        sweep,
        "a list of its runs is cut off",
        "table/groups/one/runs.json is damaged",
        lambda here: write(here / runs, b'{"ru'),
    )


def cases() -> Iterator[Case]:
    """All of them."""
    for part in (_folders, _checkpoints, _export, _report, _many):
        yield from part()


# What makes them


def edit(part: str, **values: object) -> Prepare:
    """Changes values in a run's config.json."""

    def apply(run: Path) -> None:
        config = json.loads((run / "config.json").read_text())
        config[part] |= values
        (run / "config.json").write_text(json.dumps(config))

    return apply


def _damage(run: Path) -> None:
    path = run / "checkpoints" / "0-of-1" / "1.npz"
    path.write_bytes(path.read_bytes().replace(b"float32", b"float64"))


def _other_shapes(run: Path) -> None:
    """A checkpoint of the same options whose arrays are not the same, as another version might have written it."""
    import jax

    experiment, state = experiment_of(run)
    shutil.rmtree(run / "checkpoints")
    save_checkpoint(experiment, state._replace(clients=jax.tree.map(lambda leaf: leaf[:3], state.clients)), run)


def _other_method(run: Path) -> None:
    """As of a run with a method of the user's own, whose text is another one now."""
    path = run / "mine.py"
    write(path, SOUND.encode())
    config = json.loads((run / "config.json").read_text())
    config["options"]["method"] = "mine.py:mine"
    config["own_code"] = {"method": {"file": str(path), "digest": "0123456789ab"}}
    (run / "config.json").write_text(json.dumps(config))


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
