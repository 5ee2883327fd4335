"""Requirements on a Flax module that becomes a `Model`, each with the message for the user."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import jax

from pfl_jax.errors import InvalidInput, describe_value, one_line


@contextlib.contextmanager
def applied(inputs: jax.ShapeDtypeStruct, cannot: str = "the model cannot be applied to inputs") -> Iterator[None]:
    """Context in which a module is called with `inputs` [B, ...]: any error becomes an InvalidInput that begins with
    the words `cannot`.
    """
    try:
        yield
    except InvalidInput:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error, 200)}"
        raise InvalidInput(f"{cannot} {describe_value(inputs)}: {reason}") from None


def refuse_variables(collections: Iterable[str]) -> None:
    """Raise InvalidInput for a module with other variables than parameters; `collections` are their kinds."""
    if others := sorted(collections):
        raise InvalidInput(
            f"the module keeps variables besides its parameters ({', '.join(others)}), which a Model cannot"
        )


def refuse_dropout(head: str, there: bool) -> None:
    """Raise InvalidInput if dropout is `there` in the `head`: methods also train heads on features without dropout."""
    if there:
        raise InvalidInput(f"the head {head} has dropout, which only a backbone can have: name a later part with head=")


def require_part(path: Sequence[str], parts: Sequence[str], *, there: bool) -> None:
    """Raise InvalidInput unless the part with this path is `there`; `parts` are the paths of all parts."""
    if not there:
        raise InvalidInput(
            f"the module has no part {'/'.join(path)} with parameters: name its head with head= (--head), one of "
            f"{', '.join(parts) or 'none'}"
        )


def require_one_last_call(name: str, calls: int, last: bool) -> None:
    """Raise InvalidInput unless the head `name` is called once (`calls`), as the `last` step of its module."""
    if calls != 1:
        raise InvalidInput(f"{name} is called {calls} times: a head is called once, on the features")
    if not last:
        raise InvalidInput(
            f"the module does more after {name}, or {name} is inside nn.remat, nn.jit or another transform: a head "
            "gives the logits, and is the last step"
        )
