"""Frozen parameters: what no training changes, held once and given to compiled programs as an argument."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax

from pfl_jax.errors import InvalidInput


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Frozen:
    """Parameters of a network that no training changes, such as a pretrained base under adapters.

    The functions of a `Model` read them by `read`. A function that closes over arrays has them compiled into its
    program as constants; so the engine passes them as an argument, beside the examples, and uses them while it traces:
    every client of a device then uses the same copy, under vmap too.

    Attributes:
      values: the parameters; inside a compiled program, tracers.
      used: where `read` finds the values that are in use, the same for all copies of these parameters; static.
    """

    values: Any
    used: "ContextVar[Any]" = field(default_factory=lambda: ContextVar("frozen parameters"), metadata={"static": True})

    def read(self) -> Any:
        """The parameters: those of the innermost `use`, or their values outside."""
        return self.used.get(self.values)

    @contextmanager
    def use(self) -> Iterator[None]:
        """Let `read` give these values, in all copies, until the context ends."""
        token = self.used.set(self.values)
        try:
            yield
        finally:
            self.used.reset(token)


def use(needed: Frozen | None, given: Frozen | None) -> AbstractContextManager[None]:
    """Context in which a model's frozen parameters are those that a compiled program has as an argument.

    Args:
      needed: those of the model.
      given: those of the federation.

    Raises:
      InvalidInput: the federation has none, and the model does.
    """
    if given is not None:
        return given.use()
    if needed is not None:
        raise InvalidInput(
            "the model has frozen parameters, which would be compiled in as constants: give the engine the federation "
            "as federation.with_frozen(model.frozen)"
        )
    return nullcontext()
