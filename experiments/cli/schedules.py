"""Schedules of --schedule: hyper-parameters that change from round to round."""

import difflib
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from pfl_jax.errors import InvalidInput

FIRST_ROUND_ONLY = {"apfl": {"alpha"}}
"""Method -> real-valued hyper-parameters that only a client's first state depends on."""

FORMS = {
    "cosine": ("cosine", "cosine:END"),
    "linear": ("linear:START:END:ROUNDS",),
    "exponential": ("exponential:FACTOR",),
    "step": ("step:FACTOR:ROUNDS",),
}
"""Kind of schedule -> its forms on the command line."""


class Schedule(NamedTuple):
    """Factor of a hyper-parameter in each round.

    Attributes:
      name: name of the hyper-parameter.
      kind: a key of FORMS.
      numbers: parameters of the schedule.
    """

    name: str
    kind: str
    numbers: tuple[float, ...]

    def factor(self, index: jax.Array, rounds: int) -> jax.Array:
        """Factor in a round.

        Args:
          index: number of the round, from 0; may be traced.
          rounds: number of rounds of the run.
        """
        if self.kind == "cosine":
            schedule = optax.cosine_decay_schedule(1.0, rounds, *self.numbers)
        elif self.kind == "linear":
            start, end, transition = self.numbers
            schedule = optax.linear_schedule(start, end, int(transition))
        else:
            factor, *every = self.numbers
            schedule = optax.exponential_decay(1.0, int(*every or [1]), factor, staircase=True)
        return jnp.asarray(schedule(index))


def parse_schedule(text: str) -> Schedule:
    """Parse a schedule NAME=KIND:NUMBERS, such as lr=cosine or lam=linear:0:1:20.

    Raises:
      InvalidInput: the text has another form, or numbers are out of range.
    """
    name, equals, rest = text.partition("=")
    kind, *parameters = rest.split(":")
    name = name.replace("-", "_")
    if not name or not equals or kind not in FORMS:
        near = difflib.get_close_matches(kind, FORMS, n=1)
        raise InvalidInput(
            f"--schedule is NAME=KIND such as lr=cosine or lam=linear:0:1:20, with the kinds {', '.join(FORMS)}, "
            f"not {text}{f'; did you mean {near[0]}?' if near else ''}"
        )
    allowed = {form.count(":") for form in FORMS[kind]}
    try:
        numbers = tuple(map(float, parameters))
    except ValueError:
        numbers = None
    if numbers is None or len(numbers) not in allowed or not all(0 <= number < float("inf") for number in numbers):
        raise InvalidInput(f"--schedule {text}: {kind} is {' or '.join(FORMS[kind])}, with numbers of at least 0")
    if kind in ("linear", "step") and (numbers[-1] < 1 or numbers[-1] != int(numbers[-1])):
        raise InvalidInput(f"--schedule {text}: ROUNDS must be a whole number of at least 1, not {parameters[-1]}")
    if kind in ("exponential", "step") and numbers[0] == 0:
        raise InvalidInput(f"--schedule {text}: FACTOR must be positive")
    return Schedule(name, kind, numbers)


def check_schedules(texts: Sequence[str], method: str, real: dict[str, float]) -> None:
    """Raise InvalidInput unless the schedules are for different real-valued hyper-parameters that rounds read.

    Args:
      texts: values of --schedule.
      method: name of the method.
      real: the method's real-valued hyper-parameters.
    """
    seen: set[str] = set()
    for text in texts:
        name = parse_schedule(text).name
        if name not in real:
            raise InvalidInput(
                f"--schedule {text}: {method} has no real-valued hyper-parameter {name} (there are {', '.join(real)})"
            )
        if name in ("client_clip", "client_noise"):
            raise InvalidInput(f"--schedule {text}: epsilon is computed for one {name} in all rounds")
        if name in FIRST_ROUND_ONLY.get(method, ()):
            raise InvalidInput(f"--schedule {text}: {method} reads {name} before the first round only")
        if name in seen:
            raise InvalidInput(f"--schedule {text}: there is another schedule of {name}")
        seen.add(name)


def scheduled(texts: Sequence[str], values: dict[str, float], index: jax.Array, rounds: int) -> dict[str, jax.Array]:
    """Values of the scheduled hyper-parameters in a round.

    Args:
      texts: values of --schedule.
      values: name -> value at factor 1; may be traced.
      index: number of the round, from 0; may be traced.
      rounds: number of rounds of the run.
    """
    schedules = map(parse_schedule, texts)
    return {one.name: values[one.name] * one.factor(index, rounds) for one in schedules}
