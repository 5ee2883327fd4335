"""Factorizations of matrices under vmap: batched ones can wait forever on a CPU."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.extend import core
from problems import HYPER_PARAMETERS, tiny_federation, tiny_model

from pfl_jax import Settings, build, models
from pfl_jax.lapack import thin_svd
from pfl_jax.methods import make_method
from pfl_jax.networks import adapters
from pfl_jax.testing.problems import SHAPE

DECOMPOSITIONS = ("svd", "eigh", "cholesky", "lu", "geqrf", "schur")
USING = {"fedkd": {}, "flexlora": {}, "pfedfda": {}, "floco": {}, "fedpac": {"covariance": "empirical"}}
"""Methods that factorize matrices, with their options."""


def batched(jaxpr):
    """Names of the factorizations of more than one matrix at a time."""
    found = set()
    for equation in jaxpr.eqns:
        if equation.primitive.name in DECOMPOSITIONS and equation.invars[0].aval.ndim > 2:
            found.add(equation.primitive.name)
        for parameter in jax.tree.leaves(equation.params, is_leaf=lambda leaf: isinstance(leaf, core.ClosedJaxpr)):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                found |= batched(inner)
    return found


@pytest.mark.parametrize("name", USING)
def test_runs_side_by_side_factorize_one_matrix_at_a_time(name):
    model = tiny_model()
    if name == "flexlora":
        model = adapters.lora(models.mlp(SHAPE, 3, hidden=(6, 5)), SHAPE, rank=2, targets="fc")
    method = make_method(name, model, **HYPER_PARAMETERS | USING[name])
    engine = build(method, Settings(rounds=1, chunk=4))
    data = tiny_federation().with_frozen(method.frozen)

    def play(key):
        return engine.evaluate(data, engine.round(data, engine.init(data, key), 4)[0])

    keys = jax.vmap(jax.random.key)(jnp.arange(2))
    assert not batched(jax.make_jaxpr(jax.vmap(play))(keys).jaxpr)


def test_a_batched_factorization_is_seen():
    matrices = jnp.zeros((2, 3, 3))
    decompose = functools.partial(jnp.linalg.svd, full_matrices=False)
    assert batched(jax.make_jaxpr(jax.jit(jax.vmap(decompose)))(matrices).jaxpr) == {"svd"}
    assert not batched(jax.make_jaxpr(jax.jit(jax.vmap(thin_svd)))(matrices).jaxpr)
