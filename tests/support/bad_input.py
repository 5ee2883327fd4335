"""Every kind of bad input that meets files; `refusals.txt` has each, and what is without files, with its message.

Nothing here trains: all of it is refused before that.
"""

import contextlib
import gzip
import io
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import bad_own_data
import numpy as np
from archives import IDX_NAMES, cifar_members, idx, images, write_idx, write_tar
from run_folders import write_run
from scores import scores_of

REFUSALS = Path(__file__).with_name("refusals.txt")
"""Lines COMMAND [STATE OF FILES] => part of the message."""

GREY = (*images(40, 10, (28, 28)), *images(20, 10, (28, 28), 1))
COLOUR = (*images(20, 10, (32, 32, 3)), *images(10, 10, (32, 32, 3), 1))

RUN = "--method local --rounds 3 --num-clients 4 --train-size 20 --test-size 10 --no-compilation-cache"
"""The run whose folder `run` is, cut off after a round."""

Prepare = Callable[[Path], object]


class Case(NamedTuple):
    """A command, the state of the files it meets in words, and what makes that state beside a copy of `run`."""

    command: str
    what: str = ""
    prepare: Prepare | None = None

    def __str__(self) -> str:
        """As in `REFUSALS`."""
        return f"{self.command} [{self.what}]" if self.what else self.command


def _folders() -> Iterator[Case]:
    yield Case("digits --out mine", "mine holds thesis.tex", lambda here: _file(here / "mine" / "thesis.tex"))
    yield Case("digits --out file/run", "file is a file", lambda here: _file(here / "file"))
    yield Case("digits --out loop/run", "loop is a link to itself", lambda here: _loop(here / "loop"))
    yield Case("digits --out table", "table is the folder of a table", lambda here: _file(here / "table" / ".lock"))


def _data() -> Iterator[Case]:
    files = "--source files --data-dir data"

    def gray(what: str, change: Prepare, dataset: str = "fashion_mnist") -> Case:
        def prepare(here: Path) -> None:
            write_idx(here / "data", GREY)
            change(here / "data")

        return Case(f"{dataset} {files}", what, prepare)

    def part(number: int, change: Callable[[bytes], bytes]) -> Prepare:
        def apply(data: Path) -> None:
            path = data / f"{IDX_NAMES[number]}.gz"
            path.write_bytes(gzip.compress(change(gzip.decompress(path.read_bytes()))))

        return apply

    def cut(name: str, by: int) -> Prepare:
        return lambda data: (data / name).write_bytes((data / name).read_bytes()[:-by])

    yield Case(f"fashion_mnist {files}", "data is empty", lambda here: (here / "data").mkdir())
    yield Case(f"fashion_mnist {files}", "data is a file", lambda here: _file(here / "data"))
    yield gray("test labels are missing", lambda data: (data / f"{IDX_NAMES[3]}.gz").unlink())
    yield gray("training images: the file is cut off", cut(f"{IDX_NAMES[0]}.gz", 100))
    yield gray("training images: an example is missing", part(0, lambda content: content[:-784]))
    yield gray("test images: ten bytes", part(2, lambda content: content[:10]))
    yield gray("test images: another magic number", part(2, lambda content: b"\1" + content[1:]))
    yield gray("training images: of another size", part(0, lambda _: idx(np.zeros((40, 14, 56), np.uint8))))
    yield gray("39 labels for 40 images", part(1, lambda _: idx(np.zeros(39, np.uint8))))
    yield gray("a label that is no class", part(3, lambda content: content[:-1] + b"\x0a"))
    yield gray(
        "MNIST's labels",
        part(3, lambda _: idx(np.array([7, 2, 1, 0, 4, 1, 4, 9, 5, 9, 0, 6, 9, 0, 1, 5] + [0] * 4, np.uint8))),
    )
    yield gray("Fashion-MNIST's files", lambda data: None, "emnist")

    def color(what: str, change: Callable[[dict[str, bytes]], dict[str, bytes]], then: Prepare | None = None) -> Case:
        def prepare(here: Path) -> None:
            write_tar(here / "data" / "cifar-10-binary.tar.gz", change(cifar_members("cifar10", COLOUR)))
            if then is not None:
                then(here / "data")

        return Case(f"cifar10 {files}", what, prepare)

    bin_ = "cifar-10-batches-bin/"
    yield color("a batch is missing", lambda m: {name: m[name] for name in m if "batch_3" not in name})
    yield color("a label that is no class", lambda m: {**m, bin_ + "test_batch.bin": b"\x0b" + bytes(3072)})
    yield Case(
        f"cifar10 {files}",
        "data holds CIFAR's Python archive, which is made of pickles",
        lambda here: write_tar(
            here / "data" / "cifar-10-python.tar.gz", {"cifar-10-batches-py/data_batch_1": evil_pickle()}
        ),
    )
    yield Case(f"cinic10 {files}", "data is empty", lambda here: (here / "data").mkdir())
    yield Case(
        "cifar10 --data-dir data",
        "what was kept of prepared data is cut off",
        lambda here: _file(here / "data" / "pfl_jax" / "cifar10-3.0.2.npz", b"PK\3\4"),
    )
    yield Case("cifar10 --data-dir data", "it holds a pickle", _pickled_arrays)


def _own_data() -> Iterator[Case]:
    for command, what, prepare in bad_own_data.cases(evil_pickle):
        yield Case(command, what, prepare)


def _checkpoints() -> Iterator[Case]:
    def of(what: str, change: Prepare, words: str = "") -> Case:
        return Case(f"digits --resume run{words}", what, lambda here: change(here / "run"))

    yield of("the run is finished", lambda run: _file(run / "summary.json", b"{}"))
    yield of("the run is finished", lambda run: _file(run / "summary.json", b"{}"), " --rounds 1")
    yield of("the run is finished, without a checkpoint", _finished_without_checkpoint, " --rounds 9")
    yield of("config.json is cut off", lambda run: _file(run / "config.json", b'{"dataset": "dig'))
    yield of("config.json edited: out of range", edit("options", rounds=-3))
    yield of("config.json edited: another learning rate", edit("hyper_parameters", lr=0.5))
    yield of("config.json edited: another seed", edit("options", seed=1))
    yield of("its learning rate ends with it", edit("options", schedule=["lr=cosine"]), " --rounds 8")
    last = edit("options", full_last_round=True, participation=0.5)
    yield of("all take part in its last round", last, " --rounds 8")
    yield of("it was killed before it had a config.json", lambda run: (run / "config.json").unlink())
    yield of("metrics.jsonl is gone", lambda run: (run / "metrics.jsonl").unlink())
    yield of("metrics.jsonl is cut off", lambda run: _file(run / "metrics.jsonl", b"{"))
    yield of("a file of the checkpoint has other bytes", _damage)
    yield of("the checkpoint's arrays are of another shape", _other_shapes)
    yield of("the clients' states on disk are gone", lambda run: (_on_disk(run), (run / "clients.rows").unlink()))
    yield of("the clients' states on disk have another byte", lambda run: (_on_disk(run), _flip(run / "clients.rows")))
    yield of("another process is at work in it", lambda run: _hold(run / "metrics.jsonl"))
    yield of("the text of its own method has changed", _other_method)
    yield of("the file of its own method is gone", lambda run: (_other_method(run), (run / "mine.py").unlink()))


def _finished_without_checkpoint(run: Path) -> None:
    _file(run / "summary.json", b"{}")
    shutil.rmtree(run / "checkpoints")


SOUND = "from pfl_jax import LocalTraining, methods\n\n\ndef mine(model, training=LocalTraining(), *, pull=0.5):\n"
"""Beginning of a file with a method."""


def _own_code() -> Iterator[Case]:
    def of(what: str, text: str, words: str = "--method mine.py:mine") -> Case:
        return Case(f"digits {words}", what, lambda here: _file(here / "mine.py", text.encode()))

    whole = SOUND + "    return methods.fedavg(model, training)\n"
    yield of("mine.py defines mine", whole, "--method mine.py")
    yield of("mine.py defines mine", whole, "--method mine.py:main")
    yield of("mine.py defines mine", whole, "--method mine.py:LocalTraining")
    yield of("mine.py defines mine(..., pull)", whole, "--method mine.py:mine --pull far")
    yield of("mine.py defines mine(..., pull)", whole, "--method mine.py:mine --lam 1")
    yield of("mine has no argument training", "def mine(model, lr=0.1):\n    pass\n")
    yield of("an option of mine has no default", whole.replace("=0.5", ""))
    yield of("an option of mine is a dictionary", whole.replace("=0.5", "={}"))
    yield of("an option of mine is called rounds", whole.replace("pull", "rounds"))
    yield of("mine takes the model alone", "def mine(model):\n    pass\n")
    yield of("an option of mine is called lr", whole.replace("pull", "lr"))
    yield of("an option of mine has a type that is not there", whole.replace("pull=", "pull: 'Nothing' = "))
    yield of("mine refuses", SOUND + "    raise ValueError('no')\n")
    yield of("mine is a number", "mine = 3\n")
    yield of("mine.py raises in its third line", "\n\n1 / 0\n")
    yield of("mine.py exits", "raise SystemExit(3)\n")
    yield of("mine returns a model's parameters", SOUND + "    return {}\n")
    net = "import flax.linen as nn\n\n\nclass Net(nn.Module):\n    @nn.compact\n    def __call__(self, x):\n"
    net += "        x = x.reshape(x.shape[0], -1)\n        return {}\n\n\n"
    net += "def net(input_shape, num_classes):\n    return Net()\n"
    model = "--model mine.py:net"
    yield of("mine.py defines mine", whole, model)
    yield of("net returns a text", "def net(input_shape, num_classes):\n    return 'mlp'\n", model)
    yield of("net raises", "def net(input_shape, num_classes):\n    return num_classes / 0\n", model)
    yield of("net's module has no part head", net.format("nn.Dense(10)(x)"), model)
    yield of("net's module ends with a softmax", net.format('nn.softmax(nn.Dense(10, name="head")(x))'), model)
    yield of("net's module has other classes", net.format('nn.Dense(3, name="head")(x)'), model)
    normalized = 'nn.Dense(10, name="head")(nn.BatchNorm(axis=0)(x))'
    yield of("net's module normalizes examples", net.format(normalized), model)


def _export() -> Iterator[Case]:
    def of(what: str, words: str, change: Prepare) -> Case:
        return Case(f"export {words}", what, lambda here: change(here / "run"))

    finished = lambda run: _file(run / "summary.json", b'{"method": "local", "rounds_done": 1}')  # noqa: E731
    to = "run --to model.msgpack"
    yield of("it kept no state", to, lambda run: (finished(run), shutil.rmtree(run / "checkpoints")))
    yield of("its state has other bytes", to, lambda run: (finished(run), _damage(run)))
    for client in ("4 --to model", "-1 --to new"):
        yield of("it has four clients", f"run --client {client}.msgpack", finished)
    yield of(
        "its clients' states on disk are gone",
        to,
        lambda run: (finished(run), _on_disk(run), (run / "clients.rows").unlink()),
    )
    yield of("model.msgpack is there", "run --to model.msgpack", lambda run: _file(run.parent / "model.msgpack"))


def _report() -> Iterator[Case]:
    yield Case("report run --out page", "page is a file of another kind", lambda here: _file(here / "page"))
    yield Case("report run --out page", "page is a FIFO", lambda here: os.mkfifo(here / "page"))
    yield Case("report other", "it is empty", lambda here: (here / "other").mkdir())
    config = b'{"dataset": "digits", "options": {"method": "fedpac"}}'
    files = {"config.json": config, "metrics.jsonl": b""}
    another = lambda here: [_file(here / "other" / name, text) for name, text in files.items()]  # noqa: E731
    yield Case("report other", "its configuration is another file", another)
    for words in ("--out missing/r.html", "--eval-protocol before_aggregation"):
        yield Case(f"report other {words}", "it is a run", lambda here: write_run(here / "other"))
    yield Case("compare other", "it is a run", lambda here: write_run(here / "other"))
    two = lambda here: [write_run(here / "other" / name, description=name) for name in "ab"]  # noqa: E731
    yield Case("report other --plot x.png", "runs on two kinds of data", two)
    new = lambda here: write_run(here / "other", rounds=(), finished=False)  # noqa: E731
    yield Case("report other --plot x.png", "it has no evaluation", new)


def _loop(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(path.name)


def _many() -> Iterator[Case]:
    table = "tables --paper fedpac --table 5 --dataset fashion_mnist"
    yield Case(
        f"{table} --out table",
        "table holds another table",
        lambda here: _file(here / "table" / "table.json", b'{"paper": "fedas", "table": 2}'),
    )
    yield Case(
        f"{table} --out table", "its table.json is cut off", lambda here: _file(here / "table" / "table.json", b'{"pap')
    )
    yield Case(f"{table} --out table", "another process is at work in it", lambda here: _hold(here / "table" / ".lock"))
    yield Case(f"{table} --out table", "its .lock is a link to itself", lambda here: _loop(here / "table/.lock"))
    sweep = "sweep --dataset digits --method local --no-compilation-cache --out table"
    yield Case(sweep, "another process is at work in it", lambda here: _hold(here / "table" / ".lock"))
    runs = "table/groups/one/runs.json"
    yield Case(sweep, "a list of its runs is cut off", lambda here: _file(here / runs, b'{"ru'))
    yield Case(f"{table} --out file/table", "file is a file", lambda here: _file(here / "file"))


def cases() -> dict[str, Case]:
    """Cases with files, by their names in `REFUSALS`."""
    parts = (_folders, _data, _own_data, _checkpoints, _own_code, _export, _report, _many)
    return {str(case): case for part in parts for case in part()}


# Files that commands meet


class Evil:
    """What a malicious pickle is made of: unpickled, it leaves a file behind."""

    def __reduce__(self):
        return os.mkdir, ("pickles-are-executed",)


def evil_pickle() -> bytes:
    """A pickle that must not be read."""
    return pickle.dumps(Evil())


def _pickled_arrays(here: Path) -> None:
    (here / "data" / "pfl_jax").mkdir(parents=True)
    array = np.array([Evil()], object)
    arrays = dict.fromkeys(("fingerprint", "train_x", "train_y", "test_x", "test_y"), array)
    np.savez(here / "data" / "pfl_jax" / "cifar10-3.0.2.npz", allow_pickle=True, **arrays)


def _file(path: Path, content: bytes = b"nothing of use") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


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


def _on_disk(run: Path) -> None:
    """A checkpoint of the same run with the clients' states on disk."""
    import jax

    from pfl_jax.engine.disk_state import Table

    experiment, state = experiment_of(run)
    leaves, structure = jax.tree.flatten(state.clients)
    table = Table.create(run, leaves, 4)
    table.fill(np.arange(4), leaves)
    state = state._replace(clients=jax.tree.unflatten(structure, table.leaves()))
    shutil.rmtree(run / "checkpoints")
    save_checkpoint(experiment, state, run)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


def _other_method(run: Path) -> None:
    """As of a run with a method of the user's own, whose text is another one now."""
    path = run / "mine.py"
    _file(path, SOUND.encode())
    config = json.loads((run / "config.json").read_text())
    config["options"]["method"] = "mine.py:mine"
    config["own_code"] = {"method": {"file": str(path), "digest": "0123456789ab"}}
    (run / "config.json").write_text(json.dumps(config))


_held: list[io.IOBase] = []


def _hold(path: Path) -> None:
    """As another process would hold it: until `release`."""
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    _held.append(path.open("a"))
    fcntl.flock(_held[-1], fcntl.LOCK_EX)


def experiment_of(run: Path):
    """The run's experiment, and a state of it after a round; nothing is trained."""
    import jax
    from rich.console import Console

    from experiments.cli.request import parse
    from experiments.run import build

    experiment = build.build_experiment(parse("digits", [*RUN.split(), "--out", str(run)]), Console(file=io.StringIO()))
    shapes = experiment.state_shapes()
    plain = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes._replace(key=()))
    return experiment, plain._replace(key=jax.random.key(0), round=np.int32(1))


def untrained(made, happens=None):
    """Stands in for `simulate.run`: rounds with results but without training. happens[n]() comes before round n."""
    from pfl_jax import simulate

    def rounds(method, data, settings, key, *, state=None, **others):
        for number in range(1 if state is None else int(state.round) + 1, settings.rounds + 1):
            (happens or {}).get(number, lambda: None)()
            scores, everyone = scores_of(*np.full((4, 4), 0.25 + number / 100, np.float32)), np.arange(4)
            after = made._replace(round=np.int32(number))
            yield simulate.RoundResult(
                *(number, after, {}, everyone, everyone >= 0, everyone >= 0, scores, scores, None, 80, 1.0)
            )

    return rounds


def save_checkpoint(experiment, state, run: Path) -> None:
    """Writes the run's only checkpoint."""
    from experiments.folder.run_folder import RunFolder
    from experiments.run.rounds import Counts, Run
    from pfl_jax.engine.checkpoint import Checkpoints

    record = Run(experiment, RunFolder(run), Counts(round=1)).record()
    Checkpoints(run / "checkpoints").save(state, {}, record)


def make_run(run: Path) -> None:
    """The folder of a run that was cut off after a round."""
    from experiments.run.records import configuration

    run.mkdir()
    experiment, state = experiment_of(run)
    (run / "config.json").write_text(json.dumps(configuration(experiment)))
    (run / "metrics.jsonl").write_text('{"round": 1}\n')
    save_checkpoint(experiment, state, run)


# What is said


def answer(case: Case, run: Path, here: Path) -> tuple[int, str]:
    """Exit code and stderr, but for what differs between machines, in an empty folder with a copy of `run`."""
    from experiments import compare, export, figures, partition, sizes
    from experiments.figures.__main__ import main as figure
    from experiments.report.__main__ import main as report
    from experiments.run import command as cli
    from experiments.sweep import __main__ as sweep
    from experiments.tables import __main__ as tables
    from pfl_jax.data import files, tfds

    commands = {"tables": tables.main, "figures": figure, "sweep": sweep.main}
    commands |= {"export": export.main, "report": report, "sizes": sizes.main}
    commands |= {"compare": compare.main, "partition": partition.main}
    assert figures
    shutil.copytree(run, here / "run")
    if case.prepare is not None:
        case.prepare(here)
    name, *words = case.command.split()
    error, before = io.StringIO(), Path.cwd()
    usual = tfds._unreachable, files.SYSTEM_FOLDERS
    try:
        os.chdir(here)
        tfds._unreachable, files.SYSTEM_FOLDERS = (lambda url: "the host did not answer"), ()
        with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
            code = commands[name](words) if name in commands else cli.main(name, words)
    finally:
        tfds._unreachable, files.SYSTEM_FOLDERS = usual
        os.chdir(before)
        while _held:
            _held.pop().close()
    return code, tidy(error.getvalue(), here)


def tidy(text: str, here: Path) -> str:
    """A message without the folder it was made in, and without lists of all there is, which grow."""
    text = text.replace(f"{here.resolve()}/", "").replace(f"{here}/", "")
    text = re.sub(r"needs a value: local, .*", "needs a value: ...", text)
    return re.sub(r"\(there are [^()]*(\([^()]*\)[^()]*)*\)", "(there are ...)", text)
