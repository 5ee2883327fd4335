"""What a Flax module must satisfy to become a `Model`, each with the message for the user."""

from collections.abc import Iterable, Sequence
from typing import Any

from pfl_jax.errors import InvalidInput, one_line


def num_features_of(features: Any, head: str) -> int:
    """Number of features d of two inputs; InvalidInput unless the features are [2, d], or [2, T, d] of a sequence.

    Args:
      features: of two inputs.
      head: name of the head, for the error.
    """
    if not hasattr(features, "shape") or features.ndim not in (2, 3):
        words = in_words(features) if hasattr(features, "shape") else type(features).__name__
        raise InvalidInput(f"the features of two inputs are {words}, not [2, d]: flatten before {head}")
    return features.shape[-1]


def refuse_variables(collections: Iterable[str]) -> None:
    """Raise InvalidInput for a module with other variables than parameters.

    Args:
      collections: names of the kinds of other variables.
    """
    if others := sorted(collections):
        raise InvalidInput(
            f"the module keeps variables besides its parameters ({', '.join(others)}), which a Model cannot"
        )


def refuse_dropout(head: str, there: bool) -> None:
    """Raise InvalidInput for a head with dropout: methods also train heads on features that have none.

    Args:
      head: its name.
      there: whether it has dropout.
    """
    if there:
        raise InvalidInput(f"the head {head} has dropout, which only a backbone can have: name a later part with head=")


def require_part(path: Sequence[str], parts: Sequence[str], *, there: bool) -> None:
    """Raise InvalidInput unless a module has a part.

    Args:
      path: of the part.
      parts: paths of all parts of the module.
      there: whether the part is there.
    """
    if not there:
        raise InvalidInput(
            f"the module has no part {'/'.join(path)} with parameters: name its head with head=, one of "
            f"{', '.join(parts) or 'none'}"
        )


def require_one_last_call(name: str, calls: int, last: bool) -> None:
    """Raise InvalidInput unless a head is called once, as the last step of its module.

    Args:
      name: of the head.
      calls: number of its calls.
      last: whether its last call is the module's last step.
    """
    if calls != 1:
        raise InvalidInput(f"{name} is called {calls} times: a head is called once, on the features")
    if not last:
        raise InvalidInput(
            f"the module does more after {name}, or {name} is inside nn.remat, nn.jit or another transform: a head "
            "gives the logits, and is the last step"
        )


def not_callable(inputs: Any, error: Exception) -> InvalidInput:
    """Error for a module whose call fails.

    Args:
      inputs: shape and type of its inputs.
      error: what it raised.
    """
    return InvalidInput(f"the module cannot be called with inputs {in_words(inputs)} alone: {said(error)}")


def in_words(array: Any) -> str:
    """Type and shape of an array: "float32 [2, 8]"."""
    return f"{array.dtype} [{', '.join(map(str, array.shape))}]"


def said(error: Exception) -> str:
    """Type and message of an error, in one line of limited length."""
    return f"{type(error).__name__}: {one_line(error, 200)}"
