"""What `pfl_jax.data` needs of tables of other packages, which the tests need not install."""

import types


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

    def with_format(self, kind):
        assert kind == "numpy"
        return self

    def __getitem__(self, rows):
        assert rows == slice(None)
        return self._columns
