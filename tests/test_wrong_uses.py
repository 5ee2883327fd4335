"""Wrong uses of the Python API: each ends in one clear error before anything is compiled, or is made right.

Words of errors are tested here, in one table of calls, and those of own files by `tests/support/bad_own_data.py`. The
values that a hyper-parameter can have are tested in `tests/experiments/test_both_doors.py`.
"""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

import pfl_jax
from pfl_jax import InvalidInput, LocalTraining, Settings, data, make_method, methods, models, networks, simulate
from pfl_jax.data import Dataset, Partition
from pfl_jax.engine.cohort import Timetable
from pfl_jax.networks.adapters import lora
from pfl_jax.primitives import map_examples, solve_simplex_qp

TRAIN, TEST, SHAPE = 24, 12, (4, 4, 1)
TRAIN_Y, TEST_Y = np.arange(TRAIN) % 3, np.arange(TEST) % 3
NOISE = np.random.default_rng(0).integers(0, 40, (TRAIN + TEST, *SHAPE))
PIXELS = (NOISE + 90 * np.concatenate([TRAIN_Y, TEST_Y])[:, None, None, None]).astype(np.uint8)
TRAIN_X, TEST_X = PIXELS[:TRAIN], PIXELS[TRAIN:]
FAST = {"lr": 0.1, "batch_size": 4, "epochs": 1}
KEY, KEYS = jax.random.key(0), jax.random.split(jax.random.key(0), 2)


def dataset(**changes):
    """A sound dataset of 24 and 12 images of three classes, with changes."""
    arrays = (TRAIN_X, TRAIN_Y.astype(np.int32), TEST_X, TEST_Y.astype(np.int32))
    return Dataset("tiny", "arrays", "", True, *arrays, 3, (0.5,), (0.25,), False)._replace(**changes)


def plain(change, **changes):
    return dataset(train_x=change(TRAIN_X), test_x=change(TEST_X), **{"mean": None, "std": None} | changes)


def labeled(change):
    return dataset(train_y=change(TRAIN_Y), test_y=change(TEST_Y))


def tables(clients=3):
    """Training and test rows of each client, each in its own set."""
    return [np.arange(TRAIN)[i::clients] for i in range(clients)], [np.arange(TEST)[i::clients] for i in range(clients)]


def parts(split=None, client=0, row=None, **changes):
    """A sound partition over three clients, with changes, and other rows of one client."""
    found = Partition(*tables())._replace(**changes)
    if split is None:
        return found
    table = list(getattr(found, split))
    table[client] = row
    return found._replace(**{split: table})


def model(shape=SHAPE, classes=3):
    return models.mlp(shape, classes, hidden=(4,))


def made(name="fedavg", shape=SHAPE, classes=3, **values):
    return make_method(name, model(shape, classes), **FAST | values)


def run(from_dataset=None, partition=None, method=None, settings=None, key=KEY, **options):
    federation = data.federate(from_dataset or dataset(), parts() if partition is None else partition)
    settings = Settings(rounds=1) if settings is None else settings
    return next(iter(pfl_jax.run(method or made(), federation, settings, key, **options)), None)


def sweep(keys=KEYS, lr=(0.1, 0.2), name="lr", **options):
    """A sweep over two learning rates, or other values, up to its first round, with changes."""
    federation = data.federate(dataset(), parts())
    make = lambda **values: made(**values)  # noqa: E731
    return next(iter(pfl_jax.sweep.run(make, federation, Settings(rounds=1), keys, {name: jnp.array(lr)}, **options)))


def with_old_random_numbers():
    with jax.threefry_partitionable(False):
        run()


def cohort(size):
    """Shapes after a round of the public engine."""
    engine, federation = pfl_jax.build(made(), Settings(rounds=1)), data.federate(dataset(), parts())
    return jax.eval_shape(lambda key: engine.round(federation, engine.init(federation, key), size), KEY)


def runs(number, **options):
    return data.federate_runs(dataset(), [parts()] * number, **options)


def mistaken(key, server, client, rows):
    """Local training that reads what no server has."""
    return server["share"]


def recipe(**values):
    return methods.fedavg(model(), LocalTraining(**FAST | values))


def started(name="fedavg", clients=3, **changes):
    """State of the kind that a method has after one round, with changes."""
    engine = simulate.build(made(name), Settings(rounds=1))
    federation = data.federate(dataset(), Partition(*tables(clients)))
    shapes = jax.eval_shape(engine.init, federation, KEY)
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes._replace(key=()))
    return state._replace(**{"key": KEY, "round": jnp.int32(1)} | changes)


def continued(state, name="fedavg", **options):
    return run(method=made(name), settings=Settings(rounds=2), state=state, **options)


def at(array, place, value):
    """A float copy of an array with one other value."""
    array = array.astype(np.float32)
    array[place] = value
    return array


def several():
    """A dataset with several labels a row, which are no classes."""
    return data.from_arrays(TRAIN_X, np.eye(3)[TRAIN_Y])


def whole(given):
    return data.partition.iid(given, 1)


def mesh(*axes, **kinds):
    return Mesh(np.array(jax.devices()[:1]).reshape((1,) * len(axes)), axes, **kinds)


SCALED = {"mean": (0.5,), "std": (0.25,)}
POOLED = [row + TRAIN for row in tables()[1]]

REFUSED = {
    "floats beside a mean": (lambda: run(plain(lambda x: x / 255, **SCALED)), "uint8 pixels divided by 255"),
    "standard deviation 0": (lambda: run(dataset(std=(0.0,))), "std above 0"),
    "mean of 0 to 255": (lambda: run(dataset(mean=(127.5,), std=(64.0,))), "between 0 and 1"),
    "integers beyond 32 bits": (lambda: run(plain(lambda x: x[:, 0, 0].astype(np.int64) << 40)), "beyond 32 bits"),
    "inputs that are strings": (lambda: run(plain(lambda x: x.astype(str))), "train_x holds <U"),
    "bytes beside floats": (lambda: run(dataset(test_x=TEST_X / 255, mean=None, std=None)), ": give all the same"),
    "test images of another size": (lambda: run(dataset(test_x=TEST_X[:, :3])), ": give all the same"),
    "NaN input": (lambda: run(plain(lambda x: at(x, (5, 1, 1, 0), np.nan))), "nan in row 5, place [1, 1, 0]"),
    "a label equal to K": (lambda: run(labeled(lambda y: y + (np.arange(len(y)) == 5))), "train_y has 3 in row 5"),
    "a label 2.7": (lambda: run(labeled(lambda y: at(y, 2, 2.7))), "train_y has 2.7"),
    "one-hot labels": (lambda: run(labeled(lambda y: np.eye(3)[y])), "argmax"),
    "a target NaN": (lambda: data.from_arrays(TRAIN_X, at(TRAIN_Y, 2, np.nan)), "y has nan in row 2 (counted"),
    "class_table without classes": (lambda: data.class_table(data.federate(several(), whole(several()))), "to count"),
    "labels shifted without classes": (lambda: data.federate(several(), parts(), shift="labels"), "are not classes"),
    "a model of other inputs": (lambda: run(method=made(shape=(5, 5, 1))), "does not take"),
    "a number for the recipe": (lambda: methods.fedavg(model(), 0.1), "training must be a LocalTraining"),
    "a field of a wrapper": (lambda: methods.fedavg(model(), server_optimizer="adam"), "or wrap the method by"),
    "arrays for a dataset": (lambda: run((TRAIN_X, TRAIN_Y)), "dataset must be a Dataset"),
    "a mask": (lambda: run(partition=parts("train", 1, np.arange(TRAIN) % 3 == 1)), "np.flatnonzero"),
    "repeated indices": (lambda: run(partition=parts("train", 1, np.array([1, 4, 4]))), "client 1 has example 4 twice"),
    "its own training examples in a test set": (
        lambda: run(partition=parts("test", 1, np.array([1, 4]), pooled=True, test=POOLED)),
        "example 1 is a test example and one for training",
    ),
    "pooled test indices without the offset": (lambda: run(partition=parts(pooled=True)), "test examples begin at 24"),
    "test indices with the offset": (lambda: run(partition=parts(test=POOLED)), "pooled=True"),
    "an index of -1": (lambda: run(partition=parts("train", 0, np.array([-1, 2]))), "training example -1"),
    "a client without training examples": (lambda: run(partition=parts("train", 1, [])), "has no training examples"),
    "one client fewer in test": (lambda: run(partition=parts(test=tables()[1][:2])), "tables of 2, 3 clients"),
    "validation examples in the test set": (
        lambda: run(partition=parts(test=POOLED, validation=[[], POOLED[0][:1], []], pooled=True)),
        "example 24 is a test example and one for training or validation",
    ),
    "dirichlet: beta 0": (lambda: data.partition.dirichlet(dataset(), 3, beta=0), "beta must be positive"),
    "iid: half examples": (lambda: data.partition.iid(dataset(), 3, train_size=1.5), "whole number"),
    "rounds True": (lambda: Settings(rounds=True), "rounds must be a whole number, not True"),
    "drop_rate NaN": (lambda: Settings(rounds=1, drop_rate=np.nan), "at least 0 and below 1, not nan"),
    "a share of nobody": (
        lambda: run(settings=Settings(rounds=1, attack="signs", attackers=0.1)),
        "attackers 0.1 of 3 clients is nobody",
    ),
    "lost messages of nobody": (lambda: run(settings=Settings(rounds=1, drop_rate=0.1)), "drop_rate 0.1 of 3 clients"),
    "a timetable of fewer clients": (
        lambda: run(settings=Settings(rounds=1, timetable=Timetable(np.array([[0]]), np.zeros((1, 1)), np.ones(1), 2))),
        "the timetable is for 2 clients, and the federation has 3",
    ),
    "means of a sweep's round": (lambda: pfl_jax.mean_scores(sweep()), "mean_scores is for the rounds of one run"),
    "lr of an array": (lambda: recipe(lr=jnp.float32(-0.1)), "lr must not be negative, not -0.1"),
    "augment True": (lambda: recipe(augment=True), "augment must be a function or None, not True"),
    "a factory with a wrong value": (lambda: methods.apfl(model(), alpha=3), "alpha must be between 0 and 1, not 3"),
    "a misspelled hyper-parameter": (lambda: made("ditto", lamb=1.0), "did you mean lam?"),
    "a folder for states on the host": (lambda: run(state_on="host", state_folder="."), "is for state_on disk"),
    "a folder that is not there": (lambda: run(state_on="disk", state_folder="absent"), "absent"),
    "a factory for a method": (lambda: run(method=methods.fedavg), "model must be a Model"),
    "a seed for a key": (lambda: run(key=0), "key must be a key, such as jax.random.key(0), not 0"),
    "a raw seed for a key": (lambda: run(key=np.uint32([3])), "key must be a key, such as jax.random.key(0)"),
    "a key of another generator": (lambda: run(key=jax.random.key(0, impl="rbg")), "threefry2x32, not of rbg"),
    "a run within jit": (lambda: jax.jit(lambda key: [*run(key=key)])(KEY), "pfl_jax.build gives the functions"),
    "a run within jit that gets nothing": (lambda: jax.jit(lambda: [*run()])(), "run loops on the host"),
    "a rate within vmap": (lambda: jax.vmap(lambda lr: [*run(method=made(lr=lr))])(jnp.ones(1)), "on the host"),
    "an old setting of random numbers": (with_old_random_numbers, "jax_threefry_partitionable is off"),
    "a network without outputs": (lambda: models.mlp((4,), 0), "at least one output, not 0: the number of classes, or"),
    "a mistake in a method of one's own": (
        lambda: run(method=made()._replace(local=mistaken, work=None)),
        "in mistaken: KeyError: 'share')",
    ),
    "a class for a module": (lambda: networks.from_flax(nn.Dense, (4,), 3), "Dense is a class: give an instance"),
    "a class of nnx": (lambda: networks.from_flax(nnx.Module, (4,), 3), "such as lambda rngs: Module(rngs=rngs)"),
    "rows without clients": (lambda: data.federate(data.from_arrays(TRAIN_X, TRAIN_Y)), "name the client of each row"),
    "a dataset as data": (lambda: pfl_jax.run(made(), dataset(), Settings(rounds=1), KEY), "it, not a Dataset"),
    "a state of another method": (lambda: continued(started("ditto")), "state is of another method"),
    "of the same shapes, but another method": (lambda: continued(started(), "fedper"), "state is of another method"),
    "a state of other clients": (lambda: continued(started(clients=4)), "state has 4 clients"),
    "a state further than the rounds": (lambda: continued(started(round=jnp.int32(5))), "has completed 5 rounds"),
    "a sweep over a negative rate": (lambda: sweep(lr=(0.1, -0.1)), "lr must not be negative, not -0.1"),
    "a sweep with one key": (lambda: sweep(KEY), "keys must be keys [R]"),
    "a sweep over batch sizes": (lambda: sweep(name="batch_size", lr=(2, 3)), "start a sweep for each"),
    "a cohort of more clients than there are": (lambda: cohort(4), "1 to 3 of 3 clients, not 4"),
    "a client that is not there": (
        lambda: data.client_data(data.federate(dataset(), parts()), 3, "train"),
        "there is no client 3",
    ),
    "adapters of other inputs": (lambda: lora(model(), (5, 5, 1), targets="fc"), "inputs float32 [2, 5, 5, 1]"),
    "a mesh with another axis": (lambda: run(mesh=mesh("data")), "as client_mesh() makes it"),
    "a sweep on a mesh with two axes": (lambda: sweep(mesh=mesh("clients", "data")), "as client_mesh() makes it"),
    "an explicit axis": (lambda: run(mesh=mesh("clients", axis_types=(AxisType.Explicit,))), "as client_mesh() makes"),
    "nobody left of those held out": (lambda: data.hold_out(data.federate(dataset(), parts()), 3), "can be held out"),
    "clients of several runs held out": (lambda: data.hold_out(runs(2), 1), "one federation, and this data has 2 runs"),
    "more partitions than seeds": (lambda: runs(3, seeds=[0, 1]), "a partition and a seed each"),
    "batches of none": (lambda: map_examples(jnp.sin, jnp.ones(3), jnp.ones(3, bool), batch_size=0), "at le"),
    "an objective of another size": (lambda: solve_simplex_qp(jnp.ones((2, 3, 3)), jnp.ones(3)), "has shape (3,)"),
}
"""Name -> call, and what its error says."""


def federate(given=None, partition=None):
    return data.federate(given or dataset(), partition or parts())


def same_labels(change):
    return lambda: federate(labeled(change))


RIGHT = {
    "float64 is rounded": (
        lambda: federate(plain(lambda x: x / 255)),
        lambda: federate(plain(lambda x: (x / 255).astype(np.float32))),
    ),
    "jax arrays": (lambda: federate(dataset(train_x=jnp.asarray(TRAIN_X), train_y=jnp.asarray(TRAIN_Y))), federate),
    "labels in lists": (same_labels(list), federate),
    "labels [P, 1]": (same_labels(lambda y: y[:, None]), federate),
    "whole floats for labels": (same_labels(lambda y: y.astype(float)), federate),
    "each table in its own set": (federate, lambda: federate(partition=parts(test=POOLED, pooled=True))),
    "lists of numbers": (
        lambda: federate(partition=Partition(*([row.tolist() for row in rows] for rows in tables()))),
        federate,
    ),
    "a table [N, n]": (lambda: federate(partition=Partition(*map(np.stack, tables()))), federate),
    "a model of more classes": (lambda: run(method=made(classes=5)) is not None, lambda: True),
}
"""Name -> call whose intention is clear, and a documented one with the same result."""


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_one_line(name):
    call, said = REFUSED[name]
    with pytest.raises(InvalidInput, match=re.escape(said)) as raised:
        call()
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize("name", RIGHT)
def test_it_is_made_right(name):
    found, expected = (jax.tree.leaves(call()) for call in RIGHT[name])
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.asarray(one).dtype == np.asarray(other).dtype
