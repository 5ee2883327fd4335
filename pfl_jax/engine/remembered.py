"""Compiled programs that are kept for later runs of the same method."""

import functools
import hashlib
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import jax
import numpy as np

from pfl_jax.base import Method
from pfl_jax.schedules import MethodSchedule

MakeMethod: TypeAlias = Callable[..., Method | MethodSchedule]
"""Function that gives a method or schedule for hyper-parameters, which are keyword arguments and may be traced."""

REMEMBERED = 8
"""Number of results that `remembered` keeps; the least recently used one is dropped."""

Result = TypeVar("Result")


class ByIdentity:
    """Part of a key for an object that may not be hashable, such as a method; equal only for the same object.

    Attributes:
      value: the object.
      state: further text that has to be equal, such as the result of `values_read`.
    """

    def __init__(self, value: Any, state: str = ""):
        self.value: Any = value
        self.state: str = state

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and self.value is other.value and self.state == other.state

    def __hash__(self) -> int:
        return id(self.value)


def values_read(it: Any) -> str:
    """Digest of the NumPy arrays, numbers and texts that functions read besides their arguments.

    A compiled program has such values as constants, and a user may change them in place between two runs. The digest
    covers values that functions close over, also in lists, dicts and objects, and the values and functions of their
    module that they read by name.

    Args:
      it: a function, or an object that has functions, such as a method.
    """
    whole, seen, left = hashlib.blake2b(), set[int](), [it]
    while left:
        one = left.pop()
        if isinstance(one, _PLAIN):
            whole.update(repr(one).encode())
            continue
        # An array of JAX cannot be changed.
        if id(one) in seen or isinstance(one, type | types.ModuleType | jax.Array):
            continue
        seen.add(id(one))
        match one:
            case np.ndarray():
                whole.update(f"{one.dtype} {one.shape}".encode() + one.tobytes())
            case types.FunctionType():
                # Values in the function's module, and its other functions, which read more of them: nobody changes
                # those of installed packages.
                is_own = not _INSTALLED & {*Path(one.__code__.co_filename).parts}
                left += [
                    value
                    for value in map(one.__globals__.get, one.__code__.co_names)
                    if isinstance(value, (*_PLAIN, np.ndarray, list, dict)) or (is_own and _is_beside(one, value))
                ]
                left += [one.__defaults__, one.__kwdefaults__, vars(one)]
                empty = types.CellType()
                left += [cell.cell_contents for cell in one.__closure__ or () if cell != empty]
            case types.MethodType():
                left += [one.__self__, one.__func__]
            case functools.partial():
                left += [one.func, one.args, one.keywords]
            case Mapping():
                left += one.values()
            case list() | tuple():
                left += one
            case _:
                # Numbers of objects are left out: they may be counters, or results that are computed once.
                inside = getattr(one, "__dict__", {}).values()
                left += [value for value in inside if callable(value) or isinstance(value, np.ndarray | list | dict)]
                left += [getattr(one, "__wrapped__", None)]
    return whole.hexdigest()


def _is_beside(function: types.FunctionType, value: Any) -> bool:
    """Whether a value is a function of the same module."""
    return callable(value) and not isinstance(value, type) and getattr(value, "__module__", "") == function.__module__


_INSTALLED = {"site-packages", "dist-packages"}
"""Folders of installed packages."""

_PLAIN = (int, float, complex, str, bytes, types.NoneType, np.generic)


def remembered(function: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate a function so that it returns the same object for the same arguments; `REMEMBERED` are kept.

    Arguments that cannot be hashed, such as a setting that is an array, are not remembered.
    """
    cached = functools.lru_cache(maxsize=REMEMBERED)(function)

    @functools.wraps(function)
    def call(*key: Any) -> Result:
        try:
            hash(key)
        except TypeError:
            return function(*key)
        return cached(*key)

    return call
