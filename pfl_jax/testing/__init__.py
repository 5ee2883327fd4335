"""Conformance checks of your own methods in your own tests, with any test runner.

    def test_my_method():
        pfl_jax.testing.check_method(my_method)

`pfl_jax.testing.conformance` has the checks one by one, `pfl_jax.testing.problems` the tiny problem they train on.
"""

import contextlib
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pfl_jax.base import Method
from pfl_jax.errors import InvalidInput, last_frame, shortened
from pfl_jax.methods.factories import function_of
from pfl_jax.tasks import CLASSIFICATION, TASKS, Task
from pfl_jax.testing.conformance import CHECKS, Subject, check_learning
from pfl_jax.testing.trees import state_trees as state_trees


def check_method(
    factory: Callable[..., Method],
    *,
    task: Task = CLASSIFICATION,
    accuracy: float = 0.85,
    skip: Sequence[str] = (),
    **hyper_parameters: Any,
) -> None:
    """Check that a method keeps the rules of `pfl_jax.base.Method`.

    On a federation of four clients, three of them in a round: structure, shapes and types of the state never change,
    and nothing is NaN; `Method.trained_from` is like the messages; a round is traced once; chunks, padding, devices and
    the order of clients have no effect, and the test set has none on the states; clients outside the cohort do not
    change; a saved and restored run ends as the uninterrupted one; a seed determines the result; runs can be vmapped
    over seeds and real-valued hyper-parameters; and the clients learn. Clients whose message does not arrive have no
    effect on the server and on the others' `Info`. With any other value of a `Literal` or bool among the
    hyper-parameters this still holds, and padding and the order of clients still have no effect. The check takes the
    time to compile about ten small programs, and one for each of these other values.

    Args:
      factory: (model, training: LocalTraining = LocalTraining(), *, ...) -> Method, as in `pfl_jax.METHODS`.
      task: task that the clients learn, one of `pfl_jax.tasks.TASKS`, or one of them with another loss or other scores.
      accuracy: value in [0, 1] that the mean over clients must exceed after twenty rounds of classification, right
        after local training and after aggregation. In other tasks a loss must fall to 0.7 of its start.
      skip: names of checks that the method is not meant to pass, keys of `pfl_jax.testing.conformance.CHECKS`.
      **hyper_parameters: values in place of the factory's defaults; without them lr is 0.1, batch_size 8 and epochs 2.

    Raises:
      AssertionError: a check failed; the message begins with its name.
      InvalidInput: a name in skip is unknown, or the tiny problem has no labels for the task.

    Example:
      >>> import pfl_jax
      >>> from pfl_jax import testing
      >>> testing.check_method(pfl_jax.methods.fedper, skip=["vmap", "devices"])
      >>> testing.check_method(pfl_jax.methods.fedper, task=pfl_jax.tasks.REGRESSION, skip=["vmap", "devices"])
    """
    if unknown := set(skip) - CHECKS.keys():
        raise InvalidInput(f"there is no check {min(unknown)!r}: choose {', '.join(CHECKS)}")
    if task.name not in TASKS:
        raise InvalidInput(f"the tiny problem has labels for {', '.join(TASKS)}, and not for the task {task.name}")
    subject = Subject(factory, task=task, **hyper_parameters)
    for name, check in CHECKS.items():
        if name in skip:
            continue
        try:
            if check is check_learning:
                check_learning(subject, accuracy)
            else:
                check(subject)
        except Exception as error:
            what = (check.__doc__ or "").partition("\n")[0]
            raise AssertionError(f"{name}: {what} But: {_message(error, factory)}") from error


def _message(error: Exception, factory: Callable[..., Method]) -> str:
    """Message of an error; if it is in the method itself, also its place and the trees that the method keeps."""
    text = shortened(" ".join(str(error).split()), 1000)
    if isinstance(error, AssertionError):
        return text
    kind = "" if isinstance(error, InvalidInput) else f"{type(error).__name__}: "
    file = inspect.getsourcefile(inspect.unwrap(function_of(factory))) or ""
    frame, trees = last_frame(error, {file}), ""
    where = f"{Path(file).name}, line {frame.lineno}, in {frame.name}: " if frame else ""
    # If the method's states cannot be made either, the error is about that.
    with contextlib.suppress(Exception):
        trees = " (state of the server: {}; of a client: {})".format(*state_trees(factory))
    return f"{where}{kind}{text}{trees}"
