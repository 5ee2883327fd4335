"""Compiled programs that are kept for later runs of the same method."""

import functools
import hashlib
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

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
    """Digest of the arrays, numbers and texts that functions read besides their arguments.

    A compiled program has such values as constants, and a user may change them between two runs. The digest covers
    values that functions close over, also in containers and objects, and the values and functions of their module that
    they read by name. Left out are numbers in objects of installed packages and of this one, which may be counters, and
    large arrays of JAX, which cannot be changed in place.

    Args:
      it: a function, or an object that has functions, such as a method.
    """
    whole, seen, left = hashlib.blake2b(), set[int](), [it]
    while left:
        one = left.pop()
        whole.update(f"\0{type(one).__name__} ".encode())
        if isinstance(one, _PLAIN):
            whole.update(repr(one).encode())
            continue
        if isinstance(one, jax.Array) and not isinstance(one, Tracer) and one.size <= SMALL:
            numbers = jax.random.key_data(one) if jnp.issubdtype(one.dtype, jax.dtypes.prng_key) else one
            whole.update(f"{one.dtype} {one.shape}".encode() + np.asarray(numbers).tobytes())
            continue
        if id(one) in seen or isinstance(one, type | types.ModuleType | jax.Array):
            continue
        seen.add(id(one))
        match one:
            case np.ndarray():
                whole.update(f"{one.dtype} {one.shape}".encode() + one.tobytes())
            case types.FunctionType():
                # Values in the function's module, and its other functions, which read more of them: nobody changes
                # those of installed packages. Functions of other modules count by their names.
                is_own = not _INSTALLED & {*Path(one.__code__.co_filename).parts}
                for value in map(one.__globals__.get, one.__code__.co_names):
                    if callable(value) and not (is_own and _is_beside(one, value)):
                        left.append(getattr(value, "__qualname__", None))
                    elif not isinstance(value, types.ModuleType):
                        left.append(value)
                left += [one.__defaults__, one.__kwdefaults__, vars(one)]
                empty = types.CellType()
                left += [cell.cell_contents for cell in one.__closure__ or () if cell != empty]
            case types.MethodType():
                left += [one.__self__, one.__func__]
            case functools.partial():
                left += [one.func, one.args, one.keywords]
            case Mapping():
                left += [*one, *one.values()]
            case list() | tuple():
                left += one
            case set() | frozenset():
                left += sorted(map(repr, one))
            case _:
                inside, is_users = getattr(one, "__dict__", {}).values(), _is_users(type(one))
                kinds = np.ndarray | list | dict
                left += [value for value in inside if is_users or callable(value) or isinstance(value, kinds)]
                left += [getattr(one, "__wrapped__", None)]
    return whole.hexdigest()


def _is_beside(function: types.FunctionType, value: Any) -> bool:
    """Whether a value is a function of the same module."""
    return callable(value) and not isinstance(value, type) and getattr(value, "__module__", "") == function.__module__


def _is_users(kind: type) -> bool:
    """Whether a class is a user's own, or of the standard library, such as argparse.Namespace."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return not _INSTALLED & {*Path(file).parts} and kind.__module__.partition(".")[0] != "pfl_jax"


_INSTALLED = {"site-packages", "dist-packages"}
"""Folders of installed packages."""

SMALL = 4096
"""Size of the largest arrays of JAX that are compared."""

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
