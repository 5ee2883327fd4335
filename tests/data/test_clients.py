"""Data sets of what people have: each client's arrays, and tables with a column of clients."""

import numpy as np
import pytest
from tables import Frame, Split, assert_rows

from pfl_jax import InvalidInput, data
from pfl_jax.data import federate, from_arrays, from_clients

RNG = np.random.default_rng(0)
SIZES = {"ward": 6, "clinic": 9, "home": 5}
X = {name: RNG.normal(size=(size, 3)) for name, size in SIZES.items()}
Y = {name: np.arange(size) % 2 for name, size in SIZES.items()}
TABLE = {
    "age": np.concatenate([rows[:, 0] for rows in X.values()]),
    "dose": np.concatenate([rows[:, 1] for rows in X.values()]),
    "pulse": np.concatenate([rows[:, 2] for rows in X.values()]),
    "ill": np.concatenate(list(Y.values())),
    "where": np.repeat(list(SIZES), list(SIZES.values())),
}


def check(dataset, names=tuple(SIZES)):
    assert dataset.client_names == names
    assert_rows(dataset, np.concatenate(list(X.values())), TABLE["ill"], TABLE["where"])


def test_clients_arrays():
    pairs = {name: (X[name], Y[name]) for name in SIZES}
    check(from_clients(pairs))
    check(from_clients({name: {"x": X[name].tolist(), "y": Y[name]} for name in SIZES}))
    check(from_clients({name: {"id": Y[name] + 5, "u": X[name], "v": Y[name]} for name in SIZES}, y="v"))
    check(from_clients({name: {"x": X[name], "z": Y[name][:, None], "y": Y[name]} for name in SIZES}, x="x"))
    check(from_clients([{"x": X[name], "y": Y[name]} for name in SIZES])._replace(client_names=tuple(SIZES)))
    assert from_clients(list(pairs.values())).client_names == ("0", "1", "2")
    # The rows of a client may be a table.
    columns = ("age", "dose", "pulse", "ill")
    tables = {name: Frame({column: TABLE[column][TABLE["where"] == name] for column in columns}) for name in SIZES}
    check(from_clients(tables, y="ill"))


class Partitioner:
    """As those of flwr-datasets."""

    num_partitions = len(SIZES)

    def load_partition(self, partition_id):
        here = TABLE["where"] == list(SIZES)[partition_id]
        return Split({name: TABLE[name][here] for name in ("age", "dose", "pulse", "ill")})


def test_a_partitioner_of_flower():
    dataset = from_clients(Partitioner(), y="ill")
    assert dataset.client_names == ("0", "1", "2")
    check(dataset._replace(client_names=tuple(SIZES)))


@pytest.mark.parametrize("kind", [Frame, Split])
def test_tables_with_a_column_of_clients(kind):
    table = kind(TABLE)
    dataset = from_clients(table, y="ill", client="where")
    check(dataset, tuple(sorted(SIZES)))
    same = from_arrays(
        np.stack([TABLE[name] for name in ("age", "dose", "pulse")], 1), TABLE["ill"], client=TABLE["where"]
    )
    np.testing.assert_array_equal(dataset.train_x, same.train_x)
    few = from_clients(table, x=["pulse", "age"], y=["dose", "ill"], client="where")
    assert few.num_classes == 0
    np.testing.assert_array_equal(few.train_x, same.train_x[:, [2, 0]])
    np.testing.assert_array_equal(few.train_y[:, 0], same.train_x[:, 1])
    assert from_clients(table, x="pulse", y="ill", client="where").input_shape == (1,)


def test_test_rows_of_a_clients_own():
    """One training row is enough then."""
    whole = {name: {"x": X[name], "y": Y[name], "test_x": -X[name][:2], "test_y": Y[name][:2]} for name in SIZES}
    dataset = from_clients(whole | {"new": {name: rows[:1] for name, rows in whole["ward"].items()}})
    assert np.bincount(dataset.train_client).tolist() == [6, 9, 5, 1]
    assert dataset.test_client.tolist() == [0, 0, 1, 1, 2, 2, 3]


def test_federate_takes_them_at_once():
    pairs = [(X[name], Y[name]) for name in SIZES]
    got = federate(pairs, seed=3, normalize=True, test_fraction=0.4)
    dataset = from_clients(pairs, seed=3, normalize=True, test_fraction=0.4)
    want = federate(dataset, data.partition.natural(dataset))
    for name in ("x", "y", "train_index", "test_index", "train_count", "test_count"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
    assert got.test_count.tolist() == [2, 4, 2]
    assert got.num_classes == 2
    np.testing.assert_array_equal(federate(dataset).train_index, want.train_index)


def test_the_number_of_classes_says_what_whole_numbers_are():
    mixed = {"ward": (X["ward"], Y["ward"]), "clinic": (X["clinic"], Y["clinic"].astype(float))}
    assert [from_clients(mixed, num_classes=number).train_y.dtype for number in (0, 2)] == [np.float32, np.int32]


def changed(**changes):
    return {"ward": {"x": X["ward"], "y": Y["ward"]}, "clinic": {"x": X["clinic"], "y": Y["clinic"]} | changes}


def with_tests(**changes):
    return {"ward": {"x": X["ward"], "y": Y["ward"], "test_x": X["ward"], "test_y": Y["ward"]} | changes}


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (changed(), {"y": "ill"}, r"client ward has no column ill \(there are x, y, client\)"),
        (changed(z=X["clinic"]), {}, "client clinic also has z, unlike client ward: "),
        (changed(y=Y["clinic"][:-1]), {}, "client clinic has 9 rows in x, and 8 in y"),
        (
            changed(y=[0.5] * 8 + [np.nan]),
            {},
            r"y has nan in row \d+ .*, which is a missing value: leave such rows out$",
        ),
        (changed(x=X["clinic"][:1], y=[0]), {}, r"client clinic has 1 row, and needs .* \(1 of 2 clients\): leave"),
        (
            changed(x=X["clinic"][:, :2]),
            {},
            r"client clinic has numbers \[2\] in x, and client ward numbers \[3\]: give all the same",
        ),
        (changed(y=["no", "yes", "no"] * 3), {"num_classes": 2}, "clinic has words in y, and client ward numbers"),
        (with_tests(test_x=X["ward"][:2]), {}, "the test set of client ward has 2 rows in x, and 6 in y"),
        ({"a": {"u": [1, 2], "v": [[3], [4]], "y": [0, 1]}}, {"x": ["u", "v"]}, r"several columns of arrays \(u, v\)"),
        (with_tests(test_x=X["ward"][:0], test_y=[]), {}, "the test set of client ward has no rows"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(given, options, message):
    with pytest.raises(InvalidInput, match=message) as error:
        federate(given, **options)
    assert "\n" not in str(error.value)
