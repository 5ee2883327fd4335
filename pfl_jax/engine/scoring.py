"""Models that clients deploy, and their scores."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.random import fold_in

from pfl_jax.base import Method, Personal, PRNGKey, PyTree, Scores
from pfl_jax.data.federated import FederatedData, client_data
from pfl_jax.primitives.metrics import score
from pfl_jax.streams import EVALUATION
from pfl_jax.tasks import Score, Task


def deployed(
    method: Method, data: FederatedData, shared: tuple[PyTree, PRNGKey, jax.Array], client: jax.Array, state: PyTree
) -> Personal:
    """Model that a client with this state would deploy; `shared`: server, key and completed rounds."""
    server, *drawn = shared
    return method.personalize(_evaluation_key(drawn, client), server, state, client_data(data, client, "train"))


def handed_over(
    method: Method, data: FederatedData, shared: tuple[PyTree, PRNGKey, jax.Array], client: jax.Array, state: PyTree
) -> PyTree:
    """State after a client's turn in an evaluation in which clients take turns; arguments as in `deployed`."""
    assert method.hand_over is not None
    assert method.hand_over.personalize is not None
    server, *drawn = shared
    key, train = _evaluation_key(drawn, client), client_data(data, client, "train")
    return method.hand_over.personalize(key, server, state, train)


def _evaluation_key(drawn: Sequence[jax.Array], client: jax.Array) -> PRNGKey:
    """A client's key in an evaluation, given the run's key and completed rounds."""
    key, rounds = drawn
    return fold_in(fold_in(fold_in(key, EVALUATION), rounds), client)


def checked_predict(method: Method, data: FederatedData) -> Callable[..., jax.Array]:
    """A method's `predict`; while it is traced, it raises InvalidInput if outputs do not fit the task and the data."""

    def predict(personal, inputs):
        outputs = method.predict(personal, inputs)
        method.task.check(outputs.shape, data.num_classes)
        return outputs

    return predict


def of_training(task: Task) -> Task:
    """The task with its loss as the only score."""
    return task._replace(scores=(Score("loss", task.loss, False),), kept=lambda outputs, y: outputs)


def without_loss(scores: Scores) -> Scores:
    """Scores [N] of clients that were never trained, with a place for the loss of `of_training`."""
    return dataclasses.replace(scores, train=Scores({"loss": jnp.full(scores.shape, jnp.nan, jnp.float32)}))


def score_client(
    method: Method, personal: Personal, data: FederatedData, client: int | jax.Array, *, training: bool = False
) -> Scores:
    """Scores of a client's model on its test examples and, where the federation has them, validation examples; with
    `training` also the loss on its training examples, see `Scores.train`."""
    predict = checked_predict(method, data)
    scores = score(predict, personal, client_data(data, client, "test"), method.task)
    if training:
        found = score(predict, personal, client_data(data, client, "train"), of_training(method.task))
        scores = dataclasses.replace(scores, train=found)
    if data.validation_count is None:
        return scores
    validation = score(predict, personal, client_data(data, client, "validation"), method.task)
    return dataclasses.replace(scores, validation=validation)
