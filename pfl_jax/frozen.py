"""Frozen parameters: never changed by training, held once, and given to compiled programs as an argument."""

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
    """Parameters of a network that training never changes, such as a pretrained base under adapters.

    The functions of a `Model` get them from `read`. If a function closes over arrays, they are compiled into its
    program as constants. So the engine passes them as an argument, beside the examples, and sets them with `use` while
    it traces: all clients of a device then share one copy, under vmap too.

    Attributes:
      values: the parameters; inside a compiled program, tracers.
      used: variable in which `read` finds the values in use, the same for all copies of these parameters; static.
    """

    values: Any
    used: "ContextVar[Any]" = field(default_factory=lambda: ContextVar("frozen parameters"), metadata={"static": True})

    def read(self) -> Any:
        """The parameters that the innermost `use` gives; `values` outside of any `use`."""
        return self.used.get(self.values)

    @contextmanager
    def use(self) -> Iterator[None]:
        """Let `read` return these values, in all copies of this object, until the context ends."""
        token = self.used.set(self.values)
        try:
            yield
        finally:
            self.used.reset(token)


def use(needed: Frozen | None, given: Frozen | None) -> AbstractContextManager[None]:
    """Context in which a model reads the frozen parameters that a compiled program got as an argument.

    Args:
      needed: frozen parameters of the model.
      given: frozen parameters of the federation.

    Raises:
      InvalidInput: the model has frozen parameters, and the federation has none.
    """
    if given is not None:
        return given.use()
    if needed is not None:
        raise InvalidInput(
            "the model has frozen parameters, which would be compiled in as constants: give the engine the federation "
            "as federation.with_frozen(model.frozen)"
        )
    return nullcontext()
