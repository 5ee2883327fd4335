"""What every server computes of the clients that arrived, from drawn messages: no local training is compiled for it."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from message_shapes import message_shapes
from problems import tiny_federation, tiny_method

from pfl_jax.base import Cohort
from pfl_jax.data import client_data
from pfl_jax.messages import is_mean, split
from pfl_jax.methods import METHODS
from pfl_jax.primitives import gather
from pfl_jax.testing.comparison import LOOSE, TOLERANCE, like

SIZES = np.array([9, 18, 14, 5, 7])
ARRIVED = np.array([True, False, True, True, False])
KEY = jax.random.key(0)


def has_rows(name):
    """Whether the server of the method gets anything of single clients, and not only means."""
    *_, message, _ = message_shapes(name)
    return bool(jax.tree.leaves(jax.eval_shape(lambda one: split(one, jnp.ones((), bool)), message)[0]))


CASES = [(name, {}) for name in METHODS if has_rows(name)] + [
    *(("fedas", options) for options in ({"synchronization": False}, {"target": "global_class_mean"})),
    *(("fedas", {"normalization": name}) for name in ("softmax", "min_max")),
    ("fedpac_proto", {"reduction": "sum"}),
    *(("dsgd", {"topology": graph}) for graph in ("erdos_renyi:0.5", " ".join(f"{i}-{i + 1}" for i in range(8)))),
    ("osgp", {"topology": "erdos_renyi:0.5"}),
]
"""Methods, with options of what the server computes; other options are of single clients."""


def drawn(shape, kind, rng):
    """Models, counts and losses, all above zero; words of fingerprints; or flags."""
    if jnp.issubdtype(kind, jnp.floating):
        return rng.uniform(0.2, 1.5, shape).astype(kind)
    return rng.integers(0, 2 if jnp.issubdtype(kind, jnp.bool_) else 2**16, shape).astype(kind)


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_the_server_knows_neither_absent_clients_nor_the_order_of_the_others(name, options):
    method, rng = tiny_method(name, **options), np.random.default_rng(0)
    server, data = method.init_server(KEY), tiny_federation(SIZES.tolist())
    (*_, shapes, _), aggregate = message_shapes(name, **options), jax.jit(method.aggregate)
    every = [method.init_client(KEY, server, client_data(data, client, "train")) for client in range(len(SIZES))]
    clients = jax.tree.map(lambda *rows: jnp.stack(rows), *every)

    def sent(part):
        """A mean, or what every client sends: zeros of those who are absent."""
        if is_mean(part):
            return jax.tree.map(lambda leaf: drawn(leaf.shape, leaf.dtype, rng), part)
        rows = drawn((5, *part.shape), part.dtype, rng)
        rows[~ARRIVED] = 0
        return rows

    messages = jax.tree.map(sent, shapes, is_leaf=is_mean)

    def computed(rows):
        """States and `Info` after a round of these clients."""
        some = jax.tree.map(lambda part: part if is_mean(part) else part[rows], messages, is_leaf=is_mean)
        cohort = Cohort(rows, np.where(ARRIVED, SIZES, 0)[rows], ARRIVED[rows], num_clients=9)
        return aggregate(KEY, server, gather(clients, rows), some, cohort)

    places, order = np.flatnonzero(ARRIVED), np.array([1, 2, 0])
    everyone, alone, turned = computed(np.arange(5)), computed(places), computed(places[order])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(alone))
    chex.assert_trees_all_close((everyone[0], *like(alone[1:], everyone[1:], places)), alone, **TOLERANCE)
    # Where one client hands over to the next, their order is part of the method.
    if method.hand_over is None:
        chex.assert_trees_all_close(turned[:2], (alone[0], gather(alone[1], order)), **LOOSE)
