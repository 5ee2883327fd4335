"""Programs of the last runs, kept so that another run of the same method compiles nothing."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

KEPT = 4
"""Results that `kept` remembers of a function."""

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def kept(build: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Make a function return the same object again for arguments equal to some of its last `KEPT` calls.

    jax.jit finds what it has traced and compiled by the function itself: two engines built alike would be compiled
    twice, one engine used twice is compiled once. Arguments that cannot be hashed are not remembered. What the
    arguments and the results hold stays in memory until others take their place.

    Args:
      build: function that makes an engine or a tuple of functions from a method, settings and the like.
    """
    remembered = functools.lru_cache(maxsize=KEPT)(build)

    @functools.wraps(build)
    def found(*arguments: _Arguments.args, **named: _Arguments.kwargs) -> _Result:
        try:
            hash((arguments, tuple(named.items())))
        except TypeError:
            return build(*arguments, **named)
        return remembered(*arguments, **named)

    return found
