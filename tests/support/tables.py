"""What `pfl_jax.data` needs of tables of other packages, which the tests need not install; and rows that came back."""

import types

import numpy as np


class Frame:
    """A pandas DataFrame of named columns."""

    def __init__(self, columns):
        self._columns, self.columns = columns, list(columns)

    def __getitem__(self, name):
        return self._columns[name]


class Split:
    """A split of a Hugging Face dataset with arrays in the place of Arrow tables, and features of some columns."""

    def __init__(self, columns, **features):
        self._columns, self.features = columns, {name: types.SimpleNamespace() for name in columns} | features

    def __len__(self):
        return len(next(iter(self._columns.values())))

    def with_format(self, kind):
        return self

    def select_columns(self, names):
        return Split({name: self._columns[name] for name in names})

    def __getitem__(self, rows):
        return self._columns if rows == slice(None) else self._columns[rows]


def assert_rows(dataset, x, y, client=None):
    """Training and test rows together are these, with the names of their classes and clients, in any order."""
    x, found = np.asarray(x, dataset.train_x.dtype), np.concatenate([dataset.train_x, dataset.test_x])
    want, got = (np.lexsort(rows.reshape(len(rows), -1).T) for rows in (x, found))
    classes = np.array(dataset.class_names or range(dataset.num_classes))
    np.testing.assert_array_equal(found[got], x[want])
    np.testing.assert_array_equal(classes[np.concatenate([dataset.train_y, dataset.test_y])][got], y[want])
    assert (client is None) == (dataset.train_client is None)
    if client is not None:
        owners = np.array(dataset.client_names)[np.concatenate([dataset.train_client, dataset.test_client])]
        np.testing.assert_array_equal(owners[got], client[want])
