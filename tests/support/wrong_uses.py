"""Wrong uses of the Python API, each a call and what it must end in.

`refused` are calls with a pattern of the error that they must end in; `right` are uses that are not as documented and
whose intention is clear, beside the documented call that they must equal.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import conftest  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

import pfl_jax
from pfl_jax import LocalTraining, Settings, data, make_method, methods, models, simulate
from pfl_jax.data.partition import Partition
from pfl_jax.data.sources import Dataset

Call = Callable[[], object]

CLASSES, TRAIN, TEST, SHAPE = 3, 24, 12, (4, 4, 1)


def _images(labels: np.ndarray) -> np.ndarray:
    noise = np.random.default_rng(0).integers(0, 40, (len(labels), *SHAPE))
    return (noise + 90 * labels[:, None, None, None]).astype(np.uint8)


TRAIN_Y, TEST_Y = np.arange(TRAIN) % CLASSES, np.arange(TEST) % CLASSES
TRAIN_X, TEST_X = _images(TRAIN_Y), _images(TEST_Y)


def dataset(**changes: Any) -> Dataset:
    """A sound dataset of 24 and 12 images of three classes, with changes."""
    whole = Dataset(
        *("tiny", "arrays", "", True),
        *(TRAIN_X, TRAIN_Y.astype(np.int32), TEST_X, TEST_Y.astype(np.int32)),
        *(CLASSES, (0.5,), (0.25,), False),
    )
    return whole._replace(**changes)


def plain(change: Callable[[np.ndarray], Any], **changes: Any) -> Dataset:
    """The dataset with changed inputs, which nothing normalizes."""
    return dataset(train_x=change(TRAIN_X), test_x=change(TEST_X), **{"mean": None, "std": None} | changes)


def tables(clients: int = 3) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Training and test rows of each client, each in its own set."""
    return [np.arange(TRAIN)[i::clients] for i in range(clients)], [np.arange(TEST)[i::clients] for i in range(clients)]


def partition(**changes: Any) -> Partition:
    """A sound partition over three clients, with changes."""
    return Partition(*tables())._replace(**changes)


def rows(split: str, client: int, row: Any, **changes: Any) -> Partition:
    """A sound partition in which one client has other rows."""
    parts = partition(**changes)
    table = list(getattr(parts, split))
    table[client] = row
    return parts._replace(**{split: table})


def federate(from_dataset: Any = None, parts: Any = None) -> data.FederatedData:
    """Federation of a dataset and a partition, by default the sound ones."""
    return data.federate(dataset() if from_dataset is None else from_dataset, partition() if parts is None else parts)


def model(shape: tuple[int, ...] = SHAPE, classes: int = CLASSES) -> pfl_jax.Model:
    """A small network."""
    return models.mlp(shape, classes, hidden=(4,))


FAST: dict[str, Any] = {"lr": 0.1, "batch_size": 4, "epochs": 1}


def run(
    from_dataset: Any = None,
    parts: Any = None,
    method: Any = None,
    settings: Any = None,
    key: Any = None,
    **options: Any,
) -> object:
    """Everything up to a first round, with changes."""
    federation = federate(from_dataset, parts)
    method = make_method("fedavg", model(), **FAST) if method is None else method
    settings = Settings(rounds=1) if settings is None else settings
    results = pfl_jax.run(method, federation, settings, jax.random.key(0) if key is None else key, **options)
    return next(iter(results), None)


def sweep(keys: Any, *, lr: Any = None, **options: Any) -> object:
    """A sweep over two learning rates up to its first round, with changes."""
    rates = {"lr": jnp.array([0.1, 0.2]) if lr is None else lr}
    results = pfl_jax.sweep.run(
        lambda lr: make_method("fedavg", model(), **{**FAST, "lr": lr}),
        *(federate(), Settings(rounds=1), keys, rates),
        **options,
    )
    return next(iter(results), None)


def built(name: Any, **values: Any) -> Call:
    """Run a method of these hyper-parameters."""
    return lambda: run(method=make_method(name, model(), **{**FAST, **values}))


def started(name: str, clients: int = 3, **values: Any) -> pfl_jax.State:
    """State of the kind that a method has after one round."""
    engine = simulate.build(make_method(name, model(), **{**FAST, **values}), Settings(rounds=1))
    key = jax.random.key(0)
    shapes = jax.eval_shape(engine.init, federate(parts=Partition(*tables(clients))), key)
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes._replace(key=()))
    return state._replace(key=key, round=jnp.int32(1))


def continued(state: Callable[[], Any], name: str = "fedavg", **options: Any) -> Call:
    """Go on from a state."""
    return lambda: run(method=make_method(name, model(), **FAST), settings=Settings(rounds=2), state=state(), **options)


def at(array: np.ndarray, place: Any, value: Any) -> np.ndarray:
    """A float copy of an array with one other value."""
    array = array.astype(np.float32)
    array[place] = value
    return array


def _inputs() -> Iterator[tuple[str, Call, str]]:
    scaled = lambda x: ((x / 255 - 0.5) / 0.25).astype(np.float32)  # noqa: E731
    text, both = "uint8 pixels divided by 255", {"mean": (0.5,), "std": (0.25,)}
    yield "normalized floats beside a mean", lambda: run(plain(scaled, **both)), text
    yield "float64 in [0, 1] beside a mean", lambda: run(plain(lambda x: x / 255, **both)), text
    yield "int8 images beside a mean", lambda: run(plain(lambda x: x.astype(np.int8), **both)), text
    yield (
        "integers beyond 32 bits",
        lambda: run(plain(lambda x: x.reshape(len(x), 16).astype(np.int64) << 40)),
        ("beyond 32 bits"),
    )
    yield "complex inputs", lambda: run(plain(lambda x: x * 1j)), "train_x holds complex128"
    yield "inputs that are strings", lambda: run(plain(lambda x: x.astype(str))), "train_x holds <U"
    mixed = r"train_x uint8 \[4, 4, 1\] and test_x float32 \[4, 4, 1\] must be of one type"
    yield "training uint8 beside test float", lambda: run(dataset(test_x=TEST_X / 255, mean=None, std=None)), mixed
    yield (
        "training float beside test uint8",
        lambda: run(dataset(train_x=TRAIN_X / 255, mean=None, std=None)),
        "train_x float32 .* test_x uint8",
    )
    yield (
        "from_arrays: training uint8 beside test float",
        lambda: run(data.from_arrays(TRAIN_X, TRAIN_Y, test_x=TEST_X / 255, test_y=TEST_Y)),
        "x uint8 .* test x float",
    )
    first = lambda x: np.repeat(x, 3, axis=3).transpose(0, 3, 1, 2)  # noqa: E731
    yield (
        "channel-first images",
        lambda: run(plain(lambda x: np.repeat(x, 3, axis=3).transpose(0, 3, 1, 2).repeat(2, 2).repeat(2, 3))),
        r"\[24, 3, 8, 8\], channels first: give \[P, H, W, C\]",
    )
    yield (
        "channel-first gray images",
        lambda: run(plain(lambda x: x.transpose(0, 3, 1, 2).repeat(2, 2).repeat(2, 3))),
        r"\[24, 1, 8, 8\], channels first",
    )
    yield (
        "from_arrays: channel-first images",
        lambda: run(data.from_arrays(first(TRAIN_X).repeat(2, 2).repeat(2, 3), TRAIN_Y)),
        r"\[24, 3, 8, 8\], channels first",
    )
    yield "test images of another size", lambda: run(dataset(test_x=TEST_X[:, :3])), "test_x uint8 .*one type and shape"
    yield "inputs of one axis", lambda: run(plain(lambda x: x[:, 0, 0, 0])), "train_x has shape"
    for what, value in (("NaN", np.nan), ("infinite", np.inf)):
        place = (5, 1, 1, 0)
        bad = plain(lambda x, value=value, place=place: at(x, place, value))
        yield f"{what} input", lambda bad=bad: run(bad), r"train_x has (nan|inf) in row 5, place \[1, 1, 0\]"
    alone = plain(lambda x: x.astype(np.float32))
    alone = alone._replace(test_x=at(TEST_X, (4, 0, 0, 0), np.nan))
    yield "NaN test input", lambda: run(alone), "test_x has nan in row 4"


def _pixels() -> Iterator[tuple[str, Call, str]]:
    text = "uint8 pixels divided by 255, between 0 and 1 for each channel, std above 0, or both None"
    for what, changes in {
        "standard deviation 0": {"std": (0.0,)},
        "standard deviation NaN": {"std": (np.nan,)},
        "mean NaN": {"mean": (np.nan,)},
        "a mean alone": {"std": None},
        "means of three channels for one": {"mean": (0.5,) * 3, "std": (0.25,) * 3},
        "mean of 0 to 255": {"mean": (127.5,), "std": (64.0,)},
    }.items():
        yield what, lambda changes=changes: run(dataset(**changes)), text


def _labels() -> Iterator[tuple[str, Call, str]]:
    def labels(change: Callable[[np.ndarray], Any], **changes: Any) -> Call:
        return lambda: run(dataset(train_y=change(TRAIN_Y), test_y=change(TEST_Y), **changes))

    bounds = "labels are the integers 0 to 2"
    yield "a label equal to K", labels(lambda y: np.where(np.arange(len(y)) == 4, 3, y)), f"train_y has 3.*{bounds}"
    yield "a label -1", labels(lambda y: np.where(np.arange(len(y)) == 4, -1, y)), f"train_y has -1.*{bounds}"
    yield "labels from 1 to K", labels(lambda y: y + 1), bounds
    yield "a label 2.7", labels(lambda y: at(y, 2, 2.7)), "train_y has 2.7"
    yield "a label NaN", labels(lambda y: at(y, 2, np.nan)), "train_y has nan"
    yield "one-hot labels", labels(lambda y: np.eye(CLASSES)[y]), r"train_y has shape \[24, 3\].*argmax"
    yield "strings for labels", labels(lambda y: y.astype(str)), "train_y holds strings.*from_arrays"
    yield "a test label equal to K", lambda: run(dataset(test_y=np.full(TEST, 3))), f"test_y has 3.*{bounds}"
    yield "fewer images than labels", lambda: run(dataset(train_x=TRAIN_X[:-3])), "21 rows in train_x.*24 labels"
    yield "more images than labels", lambda: run(dataset(train_y=TRAIN_Y[:-3])), "24 rows in train_x.*21 labels"
    yield "fewer test images than labels", lambda: run(dataset(test_x=TEST_X[:-3])), "9 rows in test_x.*12 labels"
    yield "more test images than labels", lambda: run(dataset(test_y=TEST_Y[:-3])), "12 rows in test_x.*9 labels"
    yield "no classes", lambda: run(dataset(num_classes=0)), "num_classes must be a whole number of at least 1, not 0"
    yield "2.5 classes", lambda: run(dataset(num_classes=2.5)), "num_classes must be a whole number"
    parts = lambda y: data.partition.grouped(y, y, 3, train_size=4)  # noqa: E731
    yield "grouped: one-hot labels", lambda: parts(np.eye(CLASSES)[TRAIN_Y]), r"train_y has shape \[24, 3\]"
    yield "grouped: a label -1", lambda: parts(TRAIN_Y - 1), "train_y has -1"
    yield "grouped: a label 2.7", lambda: parts(at(TRAIN_Y, 2, 2.7)), "train_y has 2.7"
    yield (
        "iid: one-hot labels",
        lambda: data.partition.iid(np.eye(CLASSES)[TRAIN_Y], TEST_Y, 3),
        r"train_y has shape \[24, 3\]",
    )


def _models() -> Iterator[tuple[str, Call, str]]:
    of = lambda shape, classes: lambda: run(method=make_method("fedavg", model(shape, classes), **FAST))  # noqa: E731
    yield "a model of fewer classes", of(SHAPE, 2), "the model has 2 classes, and a label is 2"
    yield "a model of other inputs", of((5, 5, 1), CLASSES), r"does not take .*\[4, 4, 1\]"
    yield "the name of a model", lambda: make_method("fedavg", "mlp"), "model must be a Model"
    yield "a class for a model", lambda: methods.fedavg(models.mlp), "model must be a Model"
    yield "a number for the recipe", lambda: methods.fedavg(model(), 0.1), "training must be a LocalTraining"


def _partitions() -> Iterator[tuple[str, Call, str]]:
    def of(split: str, client: int, row: Any, text: str, **changes: Any) -> tuple[Call, str]:
        return lambda: run(parts=rows(split, client, row, **changes)), text

    yield "a mask of the wrong length", *of("train", 1, np.arange(TRAIN + 1) % 3 == 1, r"client 1 .*or a mask \[24\]")
    yield "repeated indices", *of("train", 1, np.array([1, 4, 4]), "client 1 has example 4 twice")
    yield "repeated test indices", *of("test", 2, np.array([2, 2]), "client 2 has example 26 twice.* begin at 24")
    pooled = {"pooled": True}
    offset = [row + TRAIN for row in tables()[1]]
    yield (
        "training examples in the test set of the client",
        *of("test", 1, np.array([1, 4]), "client 1 has example 1 twice", **pooled, test=list(offset)),
    )
    yield (
        "training examples in the test set of another client",
        *of("test", 1, np.array([2, 5]), "example 2 is a training and a test example", **pooled, test=list(offset)),
    )
    yield (
        "pooled test indices without the offset",
        lambda: run(parts=Partition(*tables(), pooled=True)),
        "twice; test examples begin at 24",
    )
    yield (
        "test indices with the offset",
        lambda: run(parts=Partition(tables()[0], offset)),
        "client 0 has test example 24, and there are 0 to 11.*pooled=True",
    )
    there = "client 0 has training example"
    yield "an index of -1", *of("train", 0, np.array([-1, 2]), f"{there} -1, and there are 0 to 23")
    yield "an index of P", *of("train", 0, np.array([24]), f"{there} 24, and there are 0 to 23")
    for what, row in {
        "that are floats": np.array([1.0, 4.0]),
        "of two axes": np.array([[1, 4]]),
        "that are strings": np.array(["1"]),
        "that are None": None,
    }.items():
        yield f"indices {what}", *of("train", 1, row, "client 1 has training indices of .*give whole numbers")
    for split, words in (("train", "training"), ("test", "test")):
        yield f"a client without {words} examples", *of(split, 1, [], f"client 1 has no {words} examples")
    apart = rows("train", 1, np.array([4, 7])).train
    validation = [np.array([], int), np.array([1, 4]), np.array([], int)]
    for what, changes in {
        "one client fewer in training": {"train": tables()[0][:2]},
        "one client fewer in test": {"test": tables()[1][:2]},
        "validation for one client fewer": {"validation": validation[:2]},
    }.items():
        yield what, lambda changes=changes: run(parts=partition(**changes)), "tables of 2, 3 clients"
    yield (
        "validation examples among the client's training examples",
        lambda: run(parts=partition(validation=validation)),
        "client 1 has example 1 twice",
    )
    yield (
        "validation examples in the test set",
        lambda: run(parts=Partition(apart, offset, [[], offset[0][:1], []], pooled=True)),
        "example 24 is a validation and a test example",
    )
    yield "no clients", lambda: run(parts=Partition([], [])), "tables of 0 clients"
    yield "a pair for a partition", lambda: run(parts=tables()), "partition must be a data.Partition"
    yield "arrays for a dataset", lambda: run((TRAIN_X, TRAIN_Y)), "dataset must be a Dataset"
    yield "iid: no clients", lambda: data.partition.iid(TRAIN_Y, TEST_Y, 0), "number of clients"
    yield "iid: 1.5 clients", lambda: data.partition.iid(TRAIN_Y, TEST_Y, 1.5), "number of clients"
    yield "iid: half examples", lambda: data.partition.iid(TRAIN_Y, TEST_Y, 3, train_size=1.5), "whole number"
    yield "grouped: s of NaN", lambda: data.partition.grouped(TRAIN_Y, TEST_Y, 3, s=np.nan, train_size=3), "percentage"
    yield "dirichlet: beta 0", lambda: data.partition.dirichlet(TRAIN_Y, TEST_Y, 3, beta=0), "beta"
    yield (
        "dirichlet: sizes of 0",
        lambda: data.partition.dirichlet(TRAIN_Y, TEST_Y, 3, beta=9, min_size=0, train_size=0),
        "at least 1",
    )


def _settings() -> Iterator[tuple[str, Call, str]]:
    def of(**changes: Any) -> Call:
        return lambda: run(settings=Settings(**{"rounds": 1, **changes}))

    for name in ("rounds", "eval_every", "chunk"):
        for value in (1.5, 0, -1, "2", True):
            yield (
                f"{name} {value!r}",
                of(**{name: value}),
                f"{name} must be a whole number of at least 1, not {value!r}",
            )
    for name in ("participation", "straggler_rate"):
        for value in (0, -1, 1.5, np.nan, "all"):
            yield f"{name} {value!r}", of(**{name: value}), f"{name} must be .*above 0 and at most 1, not"
    for value in (-1, 2, np.nan):
        yield f"straggler_fraction {value}", of(straggler_fraction=value), "straggler_fraction must be between 0 and 1"
    for value in (-1, 1, np.nan):
        yield f"drop_rate {value}", of(drop_rate=value), "drop_rate must be at least 0 and below 1"
        yield f"attackers {value}", of(attack="signs", attackers=value), "attackers must be at least 0 and below 1"
    yield "attackers without an attack", of(attackers=0.2), "attackers needs an attack"
    yield "an unknown attack", of(attack="lies"), "unknown attack 'lies'"
    yield "attack_scale 0", of(attack="noise", attack_scale=0), "attack_scale must be positive"


def _recipe() -> Iterator[tuple[str, Call, str]]:
    def of(**values: Any) -> Call:
        return lambda: run(method=methods.fedavg(model(), LocalTraining(**{**FAST, **values})))

    for value in (0, -5, 2.5, np.nan, "many"):
        yield f"batch_size {value!r}", of(batch_size=value), "batch_size must be (at least 1|a whole number), not"
    for value in (-1, 1.5, np.nan):
        yield f"epochs {value!r}", of(epochs=value), "epochs must (be a whole number|not be negative), not"
    yield "no epochs", of(epochs=0), "epochs must be at least 1, not 0"
    for name, text in (("lr", "not be negative"), ("weight_decay", "not be negative"), ("momentum", "be at least 0")):
        yield f"{name} -0.1", of(**{name: -0.1}), f"{name} must {text}.*, not -0.1"
        yield f"{name} NaN", of(**{name: np.nan}), f"{name} must be .*, not nan"
        yield f"{name} in quotes", of(**{name: "0.1"}), f"{name} must be a number, not '0.1'"
    yield "lr of an array", of(lr=jnp.float32(-0.1)), "lr must not be negative"
    yield "momentum 1", of(momentum=1.0), "momentum must be at least 0 and below 1, not 1"
    yield "optimizer lion", of(optimizer="lion"), "unknown optimizer 'lion'"
    yield "clip_norm 0", of(clip_norm=0), "clip_norm must be positive"
    yield "dp_clip 0", of(dp_clip=0), "dp_clip must be positive"
    yield "dp_noise -1", of(dp_clip=1.0, dp_noise=-1.0), "dp_noise must not be negative"
    yield "dp_noise without dp_clip", of(dp_noise=1.0), "dp_noise needs a dp_clip"
    yield "shuffle 'no'", of(shuffle="no"), "shuffle must be True or False, not 'no'"
    yield "augment True", of(augment=True), "augment must be a function or None, not True"


def _methods() -> Iterator[tuple[str, Call, str]]:
    between, least, sign = "must be between 0 and 1, not", "must be at least 1, not", "must not be negative, not"
    for method, name, value, text in (
        *(("ditto", "lam", -1.0, sign), ("fedprox", "mu", -1.0, sign), ("fedpac", "lam", -1.0, sign)),
        *(
            ("fedas", name, "x", "there are")
            for name in ("target", "manner", "normalization", "reduction", "align_loss")
        ),
        *(("fedas", "align_epochs", -1, sign), ("fedas", "align_batch_size", 0, least)),
        *(("knn_per", "mixing", "x", "there are auto"), ("knn_per", "mixing", 3, between)),
        *(
            ("knn_per", "neighbors", 0, least),
            ("knn_per", "held_out", 2.0, between),
            ("knn_per", "kernel", "x", "there are"),
        ),
        *(("apfl", "alpha", 3, between), ("apfl", "alpha", -1, between), ("apfl", "adaptive", "no", "True or False")),
        *(
            ("fedala", "share", 2, between),
            ("fedala", "threshold", -1, sign),
        ),
        *(("cd2pfed", "share", 3, between), ("cd2pfed", "growth_rounds", -1, sign)),
        *(
            ("fedfomo", "held_out", 2, between),
            ("fedfomo", "download", 0, least),
            ("fedfomo", "fallback", "x", "there are"),
        ),
        *(("fedfomo", "epsilon", 2, between), ("fedfomo", "memory", 0, least)),
        *(("hypcluster", "clusters", 0, least), ("fedem", "learners", 0, least), ("fedem", "learners", 2.5, "whole")),
        *(
            ("fedpac", "solver", "x", "there are"),
            ("fedpac", "head_epochs", -1, sign),
            ("fedpac", "alignment", 1, "True or"),
        ),
        *(
            ("fedavg_ft", "finetune_epochs", -1, sign),
            ("pfedme", "inner_steps", 0, least),
            ("pfedhn", "hidden_size", 0, least),
        ),
        *(("ditto", "personal_epochs", 1.5, "whole"), ("scaffold", "server_lr", -1, sign)),
    ):
        yield f"{method}: {name} {value!r}", built(method, **{name: value}), f"{name}.*({text})"
    yield "the factory with a wrong value", lambda: methods.apfl(model(), alpha=3), f"alpha {between} 3"
    yield "a hyper-parameter of another method", built("fedavg", lam=1.0), "fedavg has no hyper-parameter lam"
    yield "a misspelled hyper-parameter", built("ditto", lamb=1.0), "ditto has no hyper-parameter lamb.*lam"
    yield "a misspelled method", built("fedpacc"), "unknown method 'fedpacc'.*did you mean fedpac"


def _runs() -> Iterator[tuple[str, Call, str]]:
    yield "state_on cloud", lambda: run(state_on="cloud"), "unknown state_on 'cloud' .*device, host, disk"
    yield "a folder for states on the host", lambda: run(state_on="host", state_folder="."), "is for state_on disk"
    yield "a folder that is not there", lambda: run(state_on="disk", state_folder="absent"), "absent .* is not there"
    yield "a number for a folder", lambda: run(state_on="disk", state_folder=3), "state_folder must be a folder, not 3"
    yield "on_nan x", lambda: run(on_nan="x"), "unknown on_nan 'x' .*stop, skip-client"
    yield "a factory for a method", lambda: run(method=methods.fedavg), "method must be a Method"
    yield "the name of a method", lambda: run(method="fedavg"), "method must be a Method"
    yield "a number of rounds for settings", lambda: run(settings=3), "settings must be Settings"
    yield "a seed for a key", lambda: run(key=0), "key must be a key, such as jax.random.key\\(0\\)"
    other = "key must be of JAX's generator threefry2x32, not of rbg"
    yield "a key of another generator", lambda: run(key=jax.random.key(0, impl="rbg")), other
    yield (
        "a raw key of another generator",
        lambda: run(key=jax.random.PRNGKey(0, impl="rbg")),
        "threefry2x32, not of another one",
    )
    sound = lambda: make_method("fedavg", model(), **FAST)  # noqa: E731
    key, settings = jax.random.key(0), Settings(rounds=1)
    yield (
        "a dataset for a federation",
        lambda: next(iter(pfl_jax.run(sound(), dataset(), settings, key))),
        "data must be a federation",
    )
    yield "a result for a state", continued(lambda: (1, started("fedavg"))), "state must be a State"
    yield "a state of another method", continued(lambda: started("ditto")), "state is of another method"
    yield "of the same shapes, but another method", continued(lambda: started("fedavg"), "fedper"), "another method"
    yield (
        "a state of another model",
        lambda: run(
            method=make_method("fedavg", model(), **FAST),
            settings=Settings(rounds=2),
            state=started("fedavg")._replace(server=model((4, 4, 1), 5).init(key)),
        ),
        "state is of another",
    )
    yield "a state of other clients", continued(lambda: started("fedavg", 4)), "state has 4 clients.* has 3"
    yield (
        "a state further than the rounds",
        continued(lambda: started("fedavg")._replace(round=jnp.int32(5))),
        "state has completed 5 rounds.*2",
    )
    yield (
        "a state on the host of other clients",
        continued(lambda: started("local", 4), "local", state_on="host"),
        "state has 4 clients",
    )
    yield (
        "a sweep over a negative learning rate",
        lambda: sweep(jax.random.split(key, 2), lr=jnp.array([0.1, -0.1])),
        "lr must not be negative, not -0.1",
    )
    yield (
        "a sweep with keys of another generator",
        lambda: sweep(jax.random.split(jax.random.key(0, impl="unsafe_rbg"), 2)),
        "keys must be of .*threefry2x32, not of unsafe_rbg",
    )
    for value in (0, -1, 1.5, "2"):
        yield (
            f"a sweep with chunk {value!r}",
            lambda value=value: sweep(jax.random.split(key, 2), chunk=value),
            f"chunk must be a whole number of at least 1, not {value!r}",
        )
    yield from _meshes()


def _meshes() -> Iterator[tuple[str, Call, str]]:
    device, keys = np.array(jax.devices()[:1]), jax.random.split(jax.random.key(0), 2)
    explicit = (AxisType.Explicit,)
    for what, make, text in (
        ("a mesh with another axis", lambda: Mesh(device, ("data",)), "not .*'data'"),
        (
            "a mesh with two axes",
            lambda: Mesh(device[:, None], ("clients", "data")),
            "not .*'clients'.*'data'",
        ),
        (
            "a mesh with an explicit axis",
            lambda: Mesh(device, ("clients",), explicit),
            "not .*Explicit",
        ),
        (
            "a list of devices for a mesh",
            lambda: list(device),
            "mesh must be .* as client_mesh\\(\\) makes it, not a list",
        ),
    ):
        yield what, lambda make=make: run(mesh=make()), text
        yield f"a sweep with {what}", lambda make=make: sweep(keys, mesh=make()), text


SECTIONS = {
    "Inputs": _inputs,
    "Mean and standard deviation of pixels": _pixels,
    "Labels": _labels,
    "Models": _models,
    "Partitions": _partitions,
    "Settings": _settings,
    "The recipe of local training": _recipe,
    "Hyper-parameters of methods": _methods,
    "Runs": _runs,
}


def refused() -> Iterator[tuple[str, Call, str]]:
    """Wrong uses that end in an InvalidInput: name, call, pattern in its message."""
    yield from itertools.chain.from_iterable(section() for section in SECTIONS.values())


def right() -> Iterator[tuple[str, Call, Call]]:
    """Uses whose intention is clear: name, call, and a call of the documented kind with the same result."""
    floats = lambda x: (x / 255).astype(np.float32)  # noqa: E731
    yield (
        "floats in [0, 1] stay",
        lambda: federate(plain(floats)).x,
        lambda: np.concatenate([floats(TRAIN_X), floats(TEST_X)]),
    )
    normal = lambda x: ((x / 255 - 0.5) / 0.25).astype(np.float32)  # noqa: E731
    yield (
        "normalized floats stay",
        lambda: federate(plain(normal)).x,
        lambda: np.concatenate([normal(TRAIN_X), normal(TEST_X)]),
    )
    yield "float64 is rounded", lambda: federate(plain(lambda x: x / 255)), lambda: federate(plain(floats))
    yield (
        "float16 is widened",
        lambda: federate(plain(lambda x: x.astype(np.float16))),
        lambda: federate(plain(lambda x: x.astype(np.float32))),
    )
    yield (
        "booleans are 0 and 1",
        lambda: federate(plain(lambda x: x > 40)),
        lambda: federate(plain(lambda x: (x > 40).astype(np.uint8))),
    )
    yield "jax arrays", lambda: federate(dataset(train_x=jnp.asarray(TRAIN_X), train_y=jnp.asarray(TRAIN_Y))), federate
    lists = {"train_y": TRAIN_Y.tolist(), "test_y": TEST_Y.tolist()}
    yield "labels in lists", lambda: federate(dataset(**lists)), federate
    columns = {"train_y": TRAIN_Y[:, None], "test_y": TEST_Y[:, None]}
    yield "labels [P, 1]", lambda: federate(dataset(**columns)), federate
    whole = {"train_y": TRAIN_Y.astype(float), "test_y": TEST_Y.astype(float)}
    yield "whole floats for labels", lambda: federate(dataset(**whole)), federate
    train, test = tables()
    shifted = [row + TRAIN for row in test]
    yield (
        "each table in its own set",
        lambda: federate(parts=Partition(train, test)),
        lambda: federate(parts=Partition(train, shifted, pooled=True)),
    )
    masks = [np.isin(np.arange(TRAIN), row) for row in train], [np.isin(np.arange(TEST), row) for row in test]
    yield "boolean masks", lambda: federate(parts=Partition(*masks)), federate
    yield (
        "masks of the pool",
        lambda: federate(
            parts=Partition(
                *([np.isin(np.arange(TRAIN + TEST), row) for row in part] for part in (train, shifted)), pooled=True
            )
        ),
        federate,
    )
    yield (
        "lists of numbers",
        lambda: federate(parts=Partition([row.tolist() for row in train], [row.tolist() for row in test])),
        federate,
    )
    yield "a table [N, n]", lambda: federate(parts=Partition(np.stack(train), np.stack(test))), federate
    more = lambda: make_method("fedavg", model(SHAPE, 5), **FAST)  # noqa: E731
    yield (
        "a model of more classes",
        lambda: type(pfl_jax.run(more(), federate(), Settings(rounds=1), jax.random.key(0))).__name__ == "generator",
        lambda: True,
    )
