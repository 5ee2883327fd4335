"""What every server computes of the clients that arrived, from drawn messages: no local training is compiled for it."""

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
from pfl_jax.testing.comparison import TOLERANCE, like

SIZES = np.array([9, 18, 14, 5, 7])
ARRIVED = np.array([True, False, True, True, False])
KEY = jax.random.key(0)


def has_rows(name):
    """Whether the server of the method gets anything of single clients, and not only means."""
    *_, message, _ = message_shapes(name)
    return bool(jax.tree.leaves(jax.eval_shape(lambda one: split(one, jnp.ones((), bool)), message)[0]))


def drawn(shape, kind, rng):
    """Models, counts and losses, all above zero; words of fingerprints; or flags."""
    if jnp.issubdtype(kind, jnp.floating):
        return rng.uniform(0.2, 1.5, shape).astype(kind)
    return rng.integers(0, 2 if kind == bool else 2**16, shape).astype(kind)


@pytest.mark.parametrize("name", [name for name in METHODS if has_rows(name)])
def test_clients_that_are_absent_have_no_part_in_what_the_server_computes(name):
    method, rng = tiny_method(name), np.random.default_rng(0)
    server, data, (*_, shapes, _) = method.init_server(KEY), tiny_federation(SIZES.tolist()), message_shapes(name)
    every = [method.init_client(KEY, server, client_data(data, client, "train")) for client in range(len(SIZES))]
    clients = jax.tree.map(lambda *rows: jnp.stack(rows), *every)

    def sent(part):
        """A mean, or what every client sends: zeros of those who are absent."""
        if is_mean(part):
            return jax.tree.map(lambda leaf: drawn(leaf.shape, leaf.dtype, rng), part)
        return np.where(np.expand_dims(ARRIVED, range(1, 1 + part.ndim)), drawn((5, *part.shape), part.dtype, rng), 0)

    messages = jax.tree.map(sent, shapes, is_leaf=is_mean)

    def computed(rows):
        """States and `Info` after a round of these clients."""
        some = jax.tree.map(lambda part: part if is_mean(part) else part[rows], messages, is_leaf=is_mean)
        cohort = Cohort(rows, np.where(ARRIVED, SIZES, 0)[rows], ARRIVED[rows], num_clients=9)
        return jax.jit(method.aggregate)(KEY, server, gather(clients, rows), some, cohort)

    places = np.flatnonzero(ARRIVED)
    everyone, alone = computed(np.arange(5)), computed(places)
    got = everyone[0], *like(alone[1:], everyone[1:], places)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(alone), strict=True):
        assert np.isfinite(other).all()
        np.testing.assert_allclose(one, other, **TOLERANCE)
