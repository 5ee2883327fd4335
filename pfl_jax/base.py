"""Core types of the library. Read this file first.

A method is a `Method`: a NamedTuple of pure functions, written for one client. `pfl_jax.engine.simulate` maps them over
all clients of a round, in chunks, on one or more devices; a method does not deal with jit, vmap or batching.

Shapes use these letters throughout the package:

    N   clients of the federation             M   clients of one round's cohort
    n   examples of a client, padded to the largest client; `ClientData.mask` marks the real ones
    B   examples of a mini-batch              K   classes             d   features (the backbone's output)

and equations these:

    w   parameters of a whole model           theta   backbone's parameters           phi   head's parameters
    E   local epochs                          CE   mean cross entropy
    beta_i = n_i / sum_j n_j   share of client i in the training examples of the cohort
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import jax

from pfl_jax.fast.rewrite import with_fast
from pfl_jax.frozen import Frozen
from pfl_jax.privacy_terms import Privacy
from pfl_jax.tasks import CLASSIFICATION, Scores, Task, task_of

STATISTICS = "batch_stats"
"""Key of the running statistics of batch normalization in a backbone, see `pfl_jax.networks.batch_norm`."""

PRNGKey: TypeAlias = jax.Array
"""Key from `jax.random.key`, or an array of keys."""

PyTree: TypeAlias = Any
"""Any nesting of tuples, lists, dictionaries and named tuples of arrays."""

Backbone: TypeAlias = PyTree
"""Parameters theta of the feature extractor, and under STATISTICS the running statistics of batch normalization."""

Head: TypeAlias = PyTree
"""Parameters phi of the classifier on top of the features."""

Params: TypeAlias = dict[str, PyTree]
"""Whole model: {"backbone": Backbone, "head": Head}; see `split` and `merge` in `pfl_jax.primitives.tree`."""

Server: TypeAlias = PyTree
"""State of the server between rounds: arrays of numbers or booleans (of a random key, its `jax.random.key_data`)."""

Client: TypeAlias = PyTree
"""State of one client between rounds, with leaves as in `Server`; () for no state."""

Message: TypeAlias = PyTree
"""Message of one client to the server after local training; its type depends on the method."""

Personal: TypeAlias = PyTree
"""Model that one client would deploy, in any form that the method's `predict` accepts."""

Info: TypeAlias = dict[str, PyTree]
"""Diagnostics of a round, listed under "Info" in a factory's docstring; rows of clients are in the cohort's order."""


@with_fast("features", "classify", "batch_features")
class Model(NamedTuple):
    """Model in two parts, backbone and head, as pure functions: by default a classifier.

    For other tasks, read "logits" as outputs and K as their number. Where a task has outputs for a sequence, [B, T, K],
    the features are [B, T, d].

    `features`, `classify` and `batch_features` may come from any library. `pfl_jax.fast.rewrite` makes their
    convolutions and pooling fast if every client has its own kernels; results are equal up to rounding.

    Attributes:
      init: key -> Params.
      features: (Backbone, inputs [B, ...]) -> features [B, d].
      classify: (Head, features [B, d]) -> logits [B, K].
      num_features: number of features d; 0 for a model without features, from `pfl_jax.networks.split`.
      num_classes: number of classes K.
      batch_features: (Backbone, inputs [B, ...], mask [B], key) -> (features [B, d] in training, with batch
        normalization by the mini-batch and dropout by the key; new running statistics of the backbone). None for a
        model that computes the same in training and in evaluation.
      task: meaning of the outputs: the loss of training and the scores.
      frozen: parameters that training never changes, see `pfl_jax.frozen.Frozen`; None for a model without them.
      shared: network that clients share beside their own, for `fml`, `fedkd` and `fedmrl`; None for the same network.
    """

    init: Callable[[PRNGKey], Params]
    features: Callable[[Backbone, jax.Array], jax.Array]
    classify: Callable[[Head, jax.Array], jax.Array]
    num_features: int
    num_classes: int
    batch_features: Callable[[Backbone, jax.Array, jax.Array, PRNGKey], tuple[jax.Array, PyTree]] | None = None
    task: Task = CLASSIFICATION
    frozen: Frozen | None = None
    # The documentation's generator cannot resolve "Model" in a NamedTuple of this name.
    shared: Any = None

    def __repr__(self) -> str:
        """Sizes and task of the model, instead of its functions."""
        return f"Model({self.num_features} features -> {self.num_classes} outputs, task {self.task.name})"

    @property
    def shared_network(self) -> "Model":
        """Network of the model that clients share beside their own."""
        return self if self.shared is None else self.shared

    def apply(self, params: Params, inputs: jax.Array) -> jax.Array:
        """Logits [B, K] of the whole model with parameters `params` for inputs [B, ...]."""
        return self.classify(params["head"], self.features(params["backbone"], inputs))

    def training_features(self, backbone: Backbone, batch: "ClientData", key: PRNGKey) -> tuple[jax.Array, PyTree]:
        """Features [B, d] of a mini-batch in training, with dropout by `key`, and the backbone's new statistics."""
        if self.batch_features is None:
            return self.features(backbone, batch.x), ()
        return self.batch_features(backbone, batch.x, batch.mask, key)


class ClientData(NamedTuple):
    """Examples of one client, or a mini-batch of them.

    Rows after the client's real examples are padding: finite values on which no result may depend. A method that needs
    other per-example arrays puts them into x or y, which may be pytrees with leading axis n (features in x to train a
    head, target embeddings in y to align a backbone).

    Attributes:
      x: inputs [n, ...], float32, or integers if the data has them.
      y: labels [n], int32; for tasks other than classification, numbers [n, ...], see `pfl_jax.tasks`.
      mask: [n], bool; True for real examples.
    """

    x: PyTree
    y: PyTree
    mask: jax.Array


Loss: TypeAlias = Callable[[PyTree, ClientData, PRNGKey], jax.Array]
"""(params, mini-batch of B examples, key of this step's dropout) -> scalar, the mean over the real examples."""

TrainingLoss: TypeAlias = Callable[[PyTree, ClientData, PRNGKey], tuple[jax.Array, PyTree]]
"""(params, mini-batch, key) -> (scalar as in `Loss`, new running statistics), for `has_aux=True` of `jax.grad`."""

KeylessLoss: TypeAlias = Callable[[PyTree, ClientData], jax.Array]
"""(params, mini-batch of B examples) -> scalar as in `Loss`, for a model as deployed, or with a fixed key."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cohort:
    """Clients of one round, in the order of the leading axis M in `Method.aggregate`: by client number.

    A client is absent if its message did not arrive or if it diverged. It stays in the cohort, so that shapes never
    change, but its count is 0, the rows of its messages are zeros, and no `Mean` includes it.

    Attributes:
      clients: [M], int32, distinct client numbers in [0, N), ascending.
      counts: [M], int32, training examples of each client; 0 for absent clients.
      present: [M], bool; False for absent clients.
      num_clients: number of clients N of the federation, static.
      equal: bool, whether means count all present clients equally, see `weights`; None for no.
    """

    clients: jax.Array
    counts: jax.Array
    present: jax.Array
    num_clients: int = field(metadata={"static": True})
    equal: jax.Array | None = None

    @property
    def weights(self) -> jax.Array:
        """Weights [M] in means by size, like `counts`; 1 for each present client if `equal`, after draws by size."""
        ones = self.present.astype(self.counts.dtype)
        return self.counts if self.equal is None else jax.lax.select(self.equal, ones, self.counts)


class Mean(NamedTuple):
    """Part of a message whose weighted mean over the cohort is all that the server needs.

    In `LocalResult.message` it has one client's value and weight. `Method.aggregate` gets a single `Mean` over the
    present clients instead: value sum_i weight_i value_i / sum_i weight_i, and weight sum_i weight_i. The engine adds
    the terms up as clients finish: no device holds the values of a whole cohort, devices exchange only sums, and the
    server learns nothing else about a single client (which secure aggregation could then guarantee).

    Attributes:
      value: tree of float arrays.
      weight: nonnegative; a scalar, or an array that broadcasts along the leading axes of every leaf of `value` (class
        centroids [K, d] are weighted by the examples of each class [K]). If all weights are zero, the mean is zero.
        A constant of NumPy, np.float32(1), is not divided in draws by size (`pfl_jax.engine.selection.Selection`).
    """

    value: PyTree
    weight: Any


class Exact(Mean):
    """`Mean` of values that no wrapper may change, such as shares of classes, probabilities and counts.

    Attacks, compression, robust means and late messages leave them unchanged: other values would be out of their range,
    or break a method that subtracts a client's own value from the sum.
    """

    __slots__: tuple[str, ...] = ()


class LocalResult(NamedTuple):
    """Result of `Method.local` for one client.

    Attributes:
      client: the client's next state.
      message: the client's message to the server, a tree of arrays and `Mean`s.
      personal: the client's model right after local training, for the evaluation protocol `trained`.
    """

    client: Client
    message: Message
    personal: Personal


class Survey(NamedTuple):
    """Statistics of all clients before the first round, for methods whose server needs them from the start.

    Attributes:
      local: (key, Server, ClientData) -> message of one client, a tree of `Mean`s.
      aggregate: (initial Server, means over all clients) -> Server before the first round.
    """

    local: Callable[[PRNGKey, Server, ClientData], PyTree]
    aggregate: Callable[[Server, PyTree], Server]


class HandOver(NamedTuple):
    """Turns of clients before their training: each passes a state of the server on to the next client of the cohort.

    Clients take turns by their numbers, and the first one receives the server's state. Each passes on a new state, an
    absent client the state it received. Then all train at once, each from its own state.

    Attributes:
      local: (key, Server, Client, ClientData) -> Server, before local training, with the key of `Method.local`.
      personalize: the same before `Method.personalize`, with its key, in cohorts of the usual size; None: no turns.
    """

    local: Callable[[PRNGKey, Server, Client, ClientData], Server]
    personalize: Callable[[PRNGKey, Server, Client, ClientData], Server] | None = None

    def changed(self, change: Callable[[Any], Any]) -> "HandOver":
        """These turns with `change` applied to each function."""
        return HandOver(change(self.local), self.personalize and change(self.personalize))


class TrainingCost(NamedTuple):
    """Facts that decide how clients are trained together, see `pfl_jax.engine.chunking`.

    Attributes:
      model: the model that clients train.
      batch_size: examples of a mini-batch.
      drop_last: whether incomplete last batches are left out.
      same_steps: whether all clients take the same number of steps, whatever their sizes.
    """

    model: Model
    batch_size: int
    drop_last: bool
    same_steps: bool = False


class _Functions(NamedTuple):
    """Fields of `Method`."""

    init_server: Callable[[PRNGKey], Server]
    init_client: Callable[[PRNGKey, Server, ClientData], Client]
    local: Callable[[PRNGKey, Server, Client, ClientData], LocalResult]
    aggregate: Callable[[PRNGKey, Server, Client, Message, Cohort], tuple[Server, Client, Info]]
    personalize: Callable[[PRNGKey, Server, Client, ClientData], Personal]
    predict: Callable[[Personal, jax.Array], jax.Array]
    download: Callable[[Server, Client], PyTree] | None = None
    trained_from: Callable[[Server, Client], PyTree] | None = None
    survey: Survey | None = None
    encoded: Callable[[PyTree], PyTree] | None = None
    server_is_mean: bool = False
    privacy: Privacy | None = None
    work: TrainingCost | None = None
    hand_over: HandOver | None = None


class Method(_Functions):
    """Personalized federated learning method.

    Attributes:
      init_server: key -> Server.
      init_client: (key, Server, ClientData) -> Client. Called for every client before the first round.
      local: (key, Server, Client, ClientData) -> LocalResult. Local training of one client in a round.
      aggregate: (key, Server, clients, messages, Cohort) -> (Server, clients, Info). `clients` and `messages` are
        stacked over the cohort along a leading axis M, except that each `Mean` in the messages is already reduced to
        one `Mean`. The client states are returned too, for servers that compute something for each client (FedPAC's
        heads); results for absent clients are not used.
      personalize: (key, Server, Client, ClientData) -> Personal. Model that the client would deploy now, given the
        server's state and its own; fine-tuning belongs here. Evaluation protocol `received`.
      predict: (Personal, inputs [B, ...]) -> logits or log-probabilities [B, K]; outputs of the model's task.
      download: (Server, Client) -> message of the server to one client before local training; None: the whole state.
      trained_from: (Server, Client) -> tree like the message, in which each `Mean` is replaced by the received
        parameters from which the client trained its value (zeros if the value is a change), and all else by None, a
        `Mean` that clients measure anew included. Attacks, compression, client privacy and asynchronous rounds use
        differences from it. If the field is None, the message must be one `Mean` of the download. `_replace` keeps it.
      survey: statistics that the server asks of all clients once, before their states are initialized; None: nothing.
      encoded: value of a `Mean`, or message without `Mean`s -> arrays whose shapes give its bytes; None: itself.
      server_is_mean: whether the server's state is only parameters, which each round replaces by the single `Mean` that
        clients send, so that `pfl_jax.wrappers.server_optimizer` applies. `_replace` keeps it.
      privacy: which uses of the data differential privacy covers, and which it does not; None if unknown. `_replace`
        of a function that sees a client's data drops it, unless `privacy` is given too.
      work: cost of local training, added by `pfl_jax.methods.factories.method_factory`; None if unknown.
      hand_over: turns in which clients pass a state on to the next client before they train; None for no turns.
    """

    __slots__: tuple[str, ...] = ()

    @property
    def task(self) -> Task:
        """Task of the model that clients train, or, if `work` is unknown, of the one whose `apply` predicts."""
        return task_of(self.predict) if self.work is None else self.work.model.task

    @property
    def frozen(self) -> Frozen | None:
        """Frozen parameters of the model that clients train; None for a model without them, or if `work` is unknown."""
        return None if self.work is None else self.work.model.frozen

    # Type checkers consider NamedTuple's method final; this one keeps its contract.
    def _replace(self, **changes: Any) -> "Method":  # pyright: ignore[reportIncompatibleMethodOverride]
        """This method with changed fields; if a function that sees a client's data changes, `privacy` becomes None."""
        sees_data = {"init_client", "local", "personalize", "survey", "hand_over"}
        unknown = {"privacy": None} if sees_data & changes.keys() else {}
        return super()._replace(**(unknown | changes))


class State(NamedTuple):
    """Complete state of a run; a run that is restored from it continues exactly.

    Attributes:
      server: the method's server state.
      clients: states of all clients, stacked along a leading axis N. With several networks (`pfl_jax.mixed`), server
        and clients are tuples.
      trained: leaves [N], scores of each client's model right after its last local training; NaN before the first.
      key: the run's key; the key of client i in round r is fold_in(fold_in(key, r), i).
      round: int32, number of completed rounds.
    """

    server: Server
    clients: Client
    trained: Scores
    key: PRNGKey
    round: jax.Array
