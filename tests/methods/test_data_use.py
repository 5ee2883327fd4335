"""What each method says of its use of a client's data (`Method.privacy`), against what it does."""

from dataclasses import dataclass

import chex
import jax
import jax.numpy as jnp
import method_tables
import numpy as np
import pytest
from problems import HYPER_PARAMETERS, tiny_federation, tiny_model

from pfl_jax import InvalidInput
from pfl_jax.data import client_data
from pfl_jax.methods import METHODS, default_training, make_method
from pfl_jax.methods.factories import hyper_parameters, on_linear_model
from pfl_jax.primitives import LocalTraining

KEY = jax.random.key(0)


def privacy(name, **values):
    return on_linear_model(METHODS[name], values).privacy


@pytest.mark.parametrize("name", method_tables.TABLES)
def test_the_page_says_the_same(name):
    # Otherwise run tests/support/method_tables.py.
    assert method_tables.renewed(name) == method_tables.page(name).read_text()


@pytest.mark.parametrize("name", METHODS)
def test_docstrings_have_the_trees_of_states(name):
    # Otherwise run tests/support/method_tables.py.
    assert method_tables.with_trees(name) == method_tables.source(name).read_text()


ACCEPTED = [name for name in METHODS if not privacy(name).refused]


@dataclass(frozen=True)
class Counting(LocalTraining):
    """Recipe that trains nothing and notes each private fit: its epochs, parameters, examples and loss."""

    def fit(self, key, params, data, loss, *, transformation=None):
        if self.dp_clip is not None:
            FITS.append((self.epochs, params, data, loss))
        return params


FITS = []


def fits_of(name, run, **values):
    """What `run` of a method, (method, server, client, data) -> anything, trains privately."""
    own = default_training(METHODS[name])
    recipe = {field: getattr(own, field) for field in LocalTraining.__dataclass_fields__}
    recipe |= {**HYPER_PARAMETERS, "epochs": 3, "dp_clip": 1.0, "dp_noise": 1.0}
    recipe |= {field: values.pop(field) for field in list(values) if field in recipe}
    method = METHODS[name](tiny_model(), Counting(**recipe), **values)
    server = method.init_server(KEY)
    data = client_data(tiny_federation(), 1, "train")
    client = method.init_client(KEY, server, data)
    if hasattr(client, "trained"):
        client = client._replace(trained=jnp.ones((), bool))
    if name == "fedselect":
        client = client._replace(personal=jax.tree.map(lambda mask: mask.at[..., 0].set(True), client.personal))
    FITS.clear()
    run(method, server, client, data)
    return list(FITS)


def counted(name, run, **values):
    """Private passes; nothing is computed, unless the number of epochs is."""

    def traced(method, server, client, data):
        if name == "fedas_cd2":
            return run(method, server, client, data)
        return jax.eval_shape(lambda: run(method, server, client, data))

    return sum(int(epochs) for epochs, *_ in fits_of(name, traced, **values))


def local(method, server, client, data):
    return method.local(KEY, server, client, data).message


def personalize(method, server, client, data):
    return method.personalize(KEY, server, client, data)


OTHER_PHASES = [
    *(("fedas", {"manner": "parallel"}), ("fedas", {"alignment": False}), ("fedas", {"align_epochs": 4})),
    *(("ditto", {"personal_epochs": 2}), ("fedrep", {"head_epochs": 2}), ("fedpac", {"head_epochs": 4})),
    *(("fedavg_ft", {"finetune_epochs": 2}), ("fedas_cd2", {"align_epochs": 5})),
]


SEVERAL_PHASES = {"ditto", "fedavg_ft", "fedas", "fedpac", "fedrep"}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        *((pytest.param(one, {}, marks=() if one in SEVERAL_PHASES else pytest.mark.slow)) for one in ACCEPTED),
        *OTHER_PHASES,
    ],
)
def test_passes_are_those_of_local_training_and_of_fine_tuning(name, values):
    # The same numbers of passes in every phase would hide one that is counted for another.
    known = privacy(name, epochs=3, **values)
    assert counted(name, local, **values) == known.passes
    assert counted(name, personalize, **values) == known.deployment


REPRESENTATIVES = {"moon", "fedpac", "ditto"}


@pytest.mark.parametrize(
    "name", [name if name in REPRESENTATIVES else pytest.param(name, marks=pytest.mark.slow) for name in ACCEPTED]
)
def test_losses_are_means_of_terms_of_single_examples(name):
    """What is clipped example by example adds up to the gradient of the whole batch."""
    values = {"lam": 0.3} if "lam" in hyper_parameters(METHODS[name]) else {}
    for _, params, data, loss in fits_of(name, local, **values):
        params = jax.tree.map(lambda leaf: leaf + 0.05, params)
        batch = jax.tree.map(lambda leaf: leaf[:5], data)._replace(mask=jnp.arange(5) < 4)

        def value(params, batch, loss=loss):
            found = loss(params, batch, jax.random.key(0))
            return found[0] if isinstance(found, tuple) else found

        gradient = jax.jit(jax.grad(value))
        whole = gradient(params, batch)
        free = gradient(params, batch._replace(mask=jnp.zeros(5, bool)))
        single = [gradient(params, batch._replace(mask=jnp.arange(5) == row)) for row in range(4)]
        mean = jax.tree.map(lambda *leaves: sum(leaves) / 4, *single)
        chex.assert_trees_all_close(mean, whole, rtol=1e-4, atol=1e-6)
        # The terms without examples are not the whole loss.
        assert any(np.any(np.abs(a - b) > 1e-6) for a, b in zip(*map(jax.tree.leaves, (free, whole)), strict=True))


@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        ("per_fedavg", {}, "its steps compute gradients of their own"),
        ("gpfl", {}, "its loss compares the examples of a mini-batch"),
        ("scaffold", {"clip_norm": 1.0}, "its control variates need the gradient itself"),
        ("scaffold", {"optimizer": "adam"}, "its control variates need the gradient itself"),
        ("fedas", {"align_loss": "class_sum"}, "weights an example by the others of its class"),
        ("fedas", {"manner": "parallel", "target": "global_class_mean"}, "averages over the examples that have"),
    ],
)
def test_methods_that_would_not_be_private_are_refused(name, values, reason):
    with pytest.raises(InvalidInput, match=f"{name} cannot train with dp_clip: .*{reason}"):
        make_method(name, tiny_model(), dp_clip=1.0, **values)
    make_method(name, tiny_model(), **values)
