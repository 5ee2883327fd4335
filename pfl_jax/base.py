"""Core types of the library. Read this file first.

A method is a `Method`: a NamedTuple of pure functions, written for one client. `pfl_jax.engine.simulate` maps
them over all clients of a round, in chunks, on one device or many; a method never sees jit, vmap or batching.

Shapes use these letters throughout the package:

    N   clients of the federation             M   clients of one round's cohort
    n   examples of a client, padded to the largest client; `ClientData.mask` says which are real
    B   examples of a mini-batch              K   classes             d   features (the backbone's output)
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

PRNGKey: TypeAlias = jax.Array
"""A key of `jax.random.key`, or a stack of them."""

PyTree: TypeAlias = Any
"""Arrays in tuples, lists, dictionaries, named tuples."""

Backbone: TypeAlias = PyTree
"""Parameters theta of the feature extractor."""

Head: TypeAlias = PyTree
"""Parameters phi of the classifier on top of the features."""

Params: TypeAlias = dict[str, PyTree]
"""A whole model: {"backbone": Backbone, "head": Head}. `pfl_jax.primitives.tree` splits and merges it."""

Server: TypeAlias = PyTree
"""State of the server between rounds; its type depends on the method."""

Client: TypeAlias = PyTree
"""State of one client between rounds; its type depends on the method, () if there is none."""

Message: TypeAlias = PyTree
"""Message of one client to the server after local training; its type depends on the method."""

Personal: TypeAlias = PyTree
"""The model that one client would deploy, in any form that the method's `predict` takes."""

Info: TypeAlias = dict[str, PyTree]
"""Diagnostics of a round besides the next state: head weights, Fisher traces, ... Never read by the next round."""


class Model(NamedTuple):
    """Classifier in two parts, backbone and head, as pure functions.

    Attributes:
      init: key -> Params.
      features: (Backbone, inputs [B, ...]) -> features [B, d].
      classify: (Head, features [B, d]) -> logits [B, K].
      num_features: d.
      num_classes: K.
    """

    init: Callable[[PRNGKey], Params]
    features: Callable[[Backbone, jax.Array], jax.Array]
    classify: Callable[[Head, jax.Array], jax.Array]
    num_features: int
    num_classes: int

    def apply(self, params: Params, inputs: jax.Array) -> jax.Array:
        """Logits [B, K] of the whole model with these params for inputs [B, ...]."""
        return self.classify(params["head"], self.features(params["backbone"], inputs))


class ClientData(NamedTuple):
    """Examples of one client, or a mini-batch of them.

    Rows past the client's own size are padding: arbitrary but finite values that no result may depend on.
    A step that needs other per-example arrays puts them in x or y, which may be pytrees with leading axis n
    (features in x to train a head; target embeddings in y to align a backbone).

    Attributes:
      x: inputs [n, ...], float32, or the data's own integers.
      y: labels [n], int32.
      mask: [n], bool; True where the row is a real example.
    """

    x: PyTree
    y: PyTree
    mask: jax.Array


Loss: TypeAlias = Callable[[PyTree, ClientData], jax.Array]
"""(params, mini-batch of B examples) -> scalar, a mean over the examples that its mask marks."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cohort:
    """Clients of one round, in the order of the leading axis M that `Method.aggregate` sees.

    Absent clients, those whose message did not arrive and those that diverged, stay in it: their count is 0, the rows
    of their messages are zeros, and they have no part in any `Mean`. So shapes never change.

    Attributes:
      clients: [M], int32, distinct client numbers in [0, N).
      counts: [M], int32, training examples of each; 0 for absent clients.
      present: [M], bool; False for absent clients.
      num_clients: N, static.
    """

    clients: jax.Array
    counts: jax.Array
    present: jax.Array
    num_clients: int = field(metadata={"static": True})


class Mean(NamedTuple):
    """Part of a message that the server needs only as a mean over the cohort.

    In `LocalResult.message` it holds one client's value and weight. `Method.aggregate` gets one `Mean` in its place,
    with sum_i weight_i value_i / sum_i weight_i and sum_i weight_i, over the clients that are present. The engine adds
    up as clients finish: no device holds the values of a whole cohort, devices exchange sums alone, and the server
    learns nothing else of a single client (which secure aggregation can then enforce).

    Attributes:
      value: a tree of float arrays.
      weight: nonnegative; a scalar, or an array along the leading axes of every leaf of `value` (class centroids
        [K, d] have the examples of each class [K]). Where all weights are zero the mean is zero.
    """

    value: PyTree
    weight: jax.Array


class LocalResult(NamedTuple):
    """Result of `Method.local` for one client.

    Attributes:
      client: the state it keeps.
      message: what it sends; a tree of arrays and `Mean`s.
      personal: its model right after local training, for the evaluation protocol `trained`.
    """

    client: Client
    message: Message
    personal: Personal


class Scores(NamedTuple):
    """Scores of clients' models on their own test examples; NaN without a model or without examples.

    Attributes:
      accuracy: [N], float32: share of the examples that are labelled right, in [0, 1].
      loss: [N]: mean cross-entropy of the softmax of what `Method.predict` gives, in nats.
      macro_f1: [N]: mean F1 over classes that occur among labels or predictions, in [0, 1].
      auc: [N]: mean area under the one-against-the-rest ROC curves, in [0, 1]; NaN with examples of one class only.
    """

    accuracy: jax.Array | np.ndarray
    loss: jax.Array | np.ndarray
    macro_f1: jax.Array | np.ndarray
    auc: jax.Array | np.ndarray


class Method(NamedTuple):
    """Personalized federated learning method.

    Attributes:
      init_server: key -> Server.
      init_client: (key, Server, ClientData) -> Client. Called for every client before the first round.
      local: (key, Server, Client, ClientData) -> LocalResult. One client's work in a round.
      aggregate: (key, Server, clients, messages, Cohort) -> (Server, clients, Info). `clients` and `messages` are
        the cohort's, stacked along a leading axis M, but for each `Mean` of the messages, which comes as one; it
        returns the clients too, for methods whose server computes something for each of them (FedPAC's heads). What
        it returns for absent clients is not used.
      personalize: (key, Server, Client, ClientData) -> Personal. What the client would deploy now, from what it
        received and keeps; fine-tuning happens here. The evaluation protocol `received`.
      predict: (Personal, inputs [B, ...]) -> logits or log-probabilities [B, K].
      download: (Server, Client) -> what the server sends to one client for its next work, for counting bytes; None is
        the whole server state. Never run.
    """

    init_server: Callable[[PRNGKey], Server]
    init_client: Callable[[PRNGKey, Server, ClientData], Client]
    local: Callable[[PRNGKey, Server, Client, ClientData], LocalResult]
    aggregate: Callable[[PRNGKey, Server, Client, Message, Cohort], tuple[Server, Client, Info]]
    personalize: Callable[[PRNGKey, Server, Client, ClientData], Personal]
    predict: Callable[[Personal, jax.Array], jax.Array]
    download: Callable[[Server, Client], PyTree] | None = None


MethodSchedule: TypeAlias = Callable[[jax.Array], Method]
"""round -> Method, whose real-valued hyper-parameters may change with the round; rounds are int32, counted from 0."""


def at_round(method: Method | MethodSchedule, index: int | jax.Array) -> Method:
    """The method of a round.

    Args:
      method: one for all rounds, or a schedule.
      index: of the round, from 0; may be traced.
    """
    return method if isinstance(method, Method) else method(jnp.asarray(index, jnp.int32))


class State(NamedTuple):
    """Complete state of a run: saving and restoring it continues the run exactly.

    Attributes:
      server: the method's server state.
      clients: every client's state, stacked along a leading axis N.
      trained: leaves [N], the scores of each client's model right after its own last local training, NaN for clients
        never trained. Clients outside a cohort keep their last ones.
      key: the run's key; the key of client i in round r is fold_in(fold_in(key, r), i).
      round: int32, rounds done so far.
    """

    server: Server
    clients: Client
    trained: Scores
    key: PRNGKey
    round: jax.Array
