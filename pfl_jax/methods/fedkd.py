"""Mutual distillation between a personal model and a shared one that is sent as low-rank factors (Wu et al. 2022)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pfl_jax.base import Exact, LocalResult, Mean, Method, Model, Params, Privacy, PyTree
from pfl_jax.lapack import thin_svd
from pfl_jax.messages import NOT_RECEIVED
from pfl_jax.methods.factories import method_factory, needs_classes, needs_vectors
from pfl_jax.methods.fml import divergence, fit_two
from pfl_jax.primitives.aggregation import mean_by_size
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import masked_mean
from pfl_jax.validation import AboveZero, Count


class FedKDServer(NamedTuple):
    """State of the server.

    Attributes:
      student: the shared model.
      round: int32, number of completed rounds.
      initial: the teacher of all clients at first, if its network differs from the student's.
    """

    student: Params
    round: jax.Array
    initial: Params | None = None


class FedKDClient(NamedTuple):
    """Personal model (the teacher), and matrix [d_s, d] that maps the student's features to the teacher's."""

    teacher: Params
    mapping: jax.Array


class FedKDMessage(NamedTuple):
    """Change of the student as the product of its factors, and how many numbers the factors have; two `Mean`s."""

    change: Mean
    numbers: Exact


def low_rank(change: PyTree, energy: float | jax.Array) -> tuple[PyTree, jax.Array]:
    """Changes with the smallest ranks that keep a share of each array's energy, and the numbers that are then sent.

    The energy is the sum of the squared singular values. Arrays [..., m, n] count as matrices of n columns; vectors,
    and matrices whose factors are not smaller, are sent unchanged.

    Args:
      change: tree of arrays.
      energy: share, at most 1.

    Returns:
      The tree, and float32: how many numbers its factors have.
    """

    def one(leaf):
        if leaf.ndim < 2:
            return leaf, float(leaf.size)
        matrix = leaf.reshape(-1, leaf.shape[-1])
        left, values, right = thin_svd(matrix)
        squares = jnp.square(values)
        before = jnp.cumsum(squares) - squares
        kept = before < energy * jnp.sum(squares)
        sent = jnp.sum(kept) * (sum(matrix.shape) + 1.0)
        product = jnp.matmul(left * jnp.where(kept, values, 0.0), right, precision="highest").reshape(leaf.shape)
        return jnp.where(sent < leaf.size, product, leaf), jnp.minimum(sent, leaf.size)

    leaves, structure = jax.tree.flatten(change)
    found = [one(leaf) for leaf in leaves]
    numbers = sum((jnp.asarray(number, jnp.float32) for _, number in found), jnp.zeros(()))
    return jax.tree.unflatten(structure, [leaf for leaf, _ in found]), numbers


@method_factory
def fedkd(
    model: Model,
    training: LocalTraining = LocalTraining(),
    *,
    first_energy: AboveZero = 0.95,
    last_energy: AboveZero = 0.98,
    energy_rounds: Count = 200,
) -> Method:
    r"""FedKD: a personal teacher and a shared student distill into each other; the student travels as low-rank factors.

        L_t = CE_t + (KL(p_s || p_t) + mean (1/d) ||f_t - f_s M||^2) / (CE_t + CE_s)
        L_s = CE_s + (KL(p_t || p_s) + mean (1/d) ||f_t - f_s M||^2) / (CE_t + CE_s)

    On each client E epochs of SGD train teacher and M on L_t and the student on L_s; the other model's outputs and
    features have no gradient. The change D_i of the student is sent as U S V with the smallest rank that keeps a share
    T of the sum of the squared singular values; the server moves the student by sum_i beta_i D_i, approximated again. T
    grows from first_energy to last_energy in energy_rounds equal steps, the first of them before the first round.
    Clients deploy their teachers.

    Args:
      training: recipe of local training of all parameters.
      first_energy: share T of the energy from which T grows; the first round has one step more.
      last_energy: share T from round energy_rounds on.
      energy_rounds: steps in which T grows, one before each round.

    Returns:
      A `Method` with a `FedKDServer` as server state and a `FedKDClient` as client state.
      Trees: server FedKDServer(student: model, round: count); client FedKDClient(teacher: model, mapping: numbers [d,
      d]).

    Info:
      sent: [], numbers that a client sends, as a share of all numbers of its change, mean over the cohort.
      energy: [], T of the round.

    Reference:
      Wu, Wu, Lyu, Huang, Xie. Communication-Efficient Federated Learning via Knowledge Distillation. Nature
      Communications 2022. Adaptive mutual distillation, and dynamic gradient approximation; 0.95 and 0.98 are the
      released values.

    Deviations:
      Teacher and student have the same architecture and initial values, and M starts as the identity, unless
      `Model.shared` is another network; the paper's student is smaller. Both have the same learning rate; PFLlib has a
      separate option for the student's. Hidden states are compared in the last layer alone. Communication is counted
      for the whole change; `sent` is the share of it that the factors have. The student moves on the server, and
      clients receive the result, because clients outside the cohort have missed its earlier changes. A matrix is sent
      whole if its factors do not have fewer numbers. The released code (github.com/wuch15/FedKD, commit 9b9e63f) sends
      factors of every matrix except embeddings, which it does not train; its search for the rank stops below full rank
      and otherwise sends nothing. HtFLlib (commit e959261) approximates the parameters, not their change, weights
      clients equally, lets both losses train both models, divides its KL by K as well, clips the gradients of teacher,
      student and M at norm 10 each, and begins with a random M. With these choices and without truncation, three rounds
      equal its code.
    """
    needs_classes(model, "fedkd", "its models learn each other's probabilities of classes")
    needs_vectors(model, "fedkd", "it compares those vectors between two models")

    network = model.shared_network

    def value(teacher, student, mapping, batch):
        (teacher, teacher_features), (student, student_features) = teacher, student
        teacher_logits = model.classify(teacher["head"], teacher_features)
        student_logits = network.classify(student["head"], student_features)
        fixed = jax.lax.stop_gradient
        teacher_risk, student_risk = (
            model.task.loss(logits, batch.y, batch.mask) for logits in (teacher_logits, student_logits)
        )

        def hidden(own, other, matrix):
            return masked_mean(jnp.mean(jnp.square(own - other @ matrix), axis=-1), batch.mask)

        teacher_loss = teacher_risk + (
            divergence(teacher_logits, student_logits, batch.mask)
            + hidden(teacher_features, fixed(student_features), mapping)
        ) / (teacher_risk + fixed(student_risk))
        student_loss = student_risk + (
            divergence(student_logits, teacher_logits, batch.mask)
            + hidden(fixed(teacher_features), student_features, fixed(mapping))
        ) / (fixed(teacher_risk) + student_risk)
        return teacher_loss + student_loss

    def energy(server):
        share = jnp.minimum((server.round + 1) / energy_rounds, 1.0)
        return first_energy + share * (last_energy - first_energy)

    def train(key, server, client, data):
        start = client.teacher, server.student, client.mapping
        teacher, student, mapping = fit_two(model, training, key, start, data, value)
        change, numbers = low_rank(jax.tree.map(jnp.subtract, student, server.student), energy(server))
        message = FedKDMessage(mean_by_size(change, data), Exact(numbers, np.float32(1)))
        return LocalResult(FedKDClient(teacher, mapping), message, teacher)

    def aggregate(key, server, clients, messages, cohort):
        change, numbers = messages
        student = jax.tree.map(jnp.add, server.student, low_rank(change.value, energy(server))[0])
        whole = sum(leaf.size for leaf in jax.tree.leaves(server.student))
        info = {"sent": numbers.value / whole, "energy": energy(server)}
        return server._replace(student=student, round=server.round + 1), clients, info

    def init_server(key):
        initial = None if model.shared is None else model.init(key)
        return FedKDServer(network.init(key), jnp.zeros((), jnp.int32), initial)

    def init_client(key, server, data):
        teacher = server.student if server.initial is None else server.initial
        return FedKDClient(teacher, jnp.eye(network.num_features, model.num_features))

    return Method(
        init_server=init_server,
        init_client=init_client,
        local=train,
        aggregate=aggregate,
        personalize=lambda key, server, client, data: client.teacher,
        predict=model.apply,
        download=lambda server, client: server.student,
        # The message is a change already.
        trained_from=lambda server, client: FedKDMessage(jax.tree.map(jnp.zeros_like, server.student), NOT_RECEIVED),
        privacy=Privacy(refused="its loss divides by the mean losses of a mini-batch"),
    )
