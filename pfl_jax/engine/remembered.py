"""Compiled programs that are kept for later runs of the same method."""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import jax
import numpy as np

from pfl_jax.base import Method
from pfl_jax.schedules import MethodSchedule

MakeMethod: TypeAlias = Callable[..., Method | MethodSchedule]
"""Function of hyper-parameters, as keyword arguments that may be traced, to the method or schedule of `pfl_jax.run`."""

REMEMBERED = 8
"""Number of results that `remembered` keeps; the one that was used longest ago gives way."""

Result = TypeVar("Result")


class ByIdentity:
    """Part of a key for something that may not be hashed, such as a method: equal to that of the same object only."""

    def __init__(self, value: Any):
        self.value: Any = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def remembered(function: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate a function so that it returns the same object for the same arguments, the last `REMEMBERED` of them.

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


def is_input(value: Any) -> bool:
    """Whether a hyper-parameter is an input of a compiled program: a real number; others are a part of it."""
    return isinstance(value, float | np.floating | np.ndarray | jax.Array)
