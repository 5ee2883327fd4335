"""Attackers: who they are, what they send, and that everything else is as without them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import reference
from problems import tiny_federation, tiny_method, tiny_model

from pfl_jax import ClientData, LocalResult, Mean, Settings, simulate
from pfl_jax.base import Survey
from pfl_jax.methods import make_method
from pfl_jax.wrappers.attacks import attacked


def test_flipped_labels_are_all_that_the_method_sees():
    data = ClientData(jnp.zeros((3, 1)), jnp.array([0, 1, 2]), jnp.ones(3, bool))
    sees_labels = make_method("fedavg", tiny_model())._replace(
        init_client=lambda key, server, data: data.y,
        local=lambda key, server, client, data: LocalResult((), data.y, ()),
        personalize=lambda key, server, client, data: data.y,
        survey=Survey(lambda key, server, data: data.y, lambda server, means: server),
    )
    for attacks, labels in ((True, [2, 1, 0]), (False, [0, 1, 2])):
        method = attacked(sees_labels, "labels", jnp.array(attacks), scale=1.0, num_classes=3)
        assert method.init_client(0, (), data).tolist() == labels
        assert method.local(0, (), (), data).message.tolist() == labels
        assert method.personalize(0, (), (), data).tolist() == labels
        assert method.survey.local(0, (), data).tolist() == labels


@functools.partial(jax.jit, static_argnums=0)
def message_of(attack, scale, attacks):
    """What leaves a client of FedAvg with two more means of its own, and the received parameters."""
    method, key = make_method("fedavg", tiny_model()), jax.random.key(0)
    server = method.init_server(key)
    params = jax.tree.map(lambda leaf: leaf + 0.5 + jnp.arange(leaf.size).reshape(leaf.shape), server)
    message = {
        "model": Mean(params, jnp.float32(3)),
        "own": Mean(jnp.array([1.0, -2.0]), jnp.ones(2)),
        "alike": Mean(jnp.array([1.0, -2.0]), jnp.ones(2)),
        "flag": jnp.ones(2),
    }
    honest = method._replace(
        local=lambda key, server, client, data: LocalResult((), message, ()),
        trained_from=lambda server, client: {"model": server, "own": None, "alike": None, "flag": None},
    )
    sent = attacked(honest, attack, attacks, scale=scale, num_classes=0).local(key, server, (), None).message
    return server, message, sent


def test_flipped_signs():
    server, message, sent = message_of("signs", 2.0, True)
    for name, start in reference.to_numpy(server).items():
        honest, wrong = (reference.to_numpy(one["model"].value)[name] for one in (message, sent))
        np.testing.assert_allclose(wrong, start - 2 * (honest - start), rtol=1e-5)
    # Nothing was received of this kind.
    np.testing.assert_allclose(sent["own"].value, [-2, 4])
    assert float(sent["model"].weight) == 3
    np.testing.assert_array_equal(sent["flag"], message["flag"])


def test_noise_is_as_long_as_the_update():
    server, message, sent = message_of("noise", 2.0, True)
    kernel = sent["model"].value["backbone"]["kernel"] - server["backbone"]["kernel"]
    update = message["model"].value["backbone"]["kernel"] - server["backbone"]["kernel"]
    ratio = float(jnp.linalg.norm(kernel) / jnp.linalg.norm(update))
    # 24 entries: the deviation of the ratio is about 2 / sqrt(48).
    assert 1.2 < ratio < 2.8
    assert abs(np.corrcoef(np.ravel(kernel), np.ravel(update))[0, 1]) < 0.7
    # Every array has noise of its own.
    assert (sent["own"].value != sent["alike"].value).all()
    # Who is honest sends what it trained.
    _, message, sent = message_of("noise", 2.0, False)
    jax.tree.map(np.testing.assert_array_equal, sent, message)


def program(**settings):
    engine = simulate.build(tiny_method("fedavg"), Settings(rounds=1, **settings))
    data = tiny_federation()
    state = jax.eval_shape(engine.init, data, jax.random.key(0))
    return str(jax.make_jaxpr(lambda data, state: engine.round(data, state, 3)[0])(data, state))


def test_without_attackers_the_program_is_the_plain_one():
    plain = program()
    assert program(attack="signs") == plain
    # Of four clients a tenth is none.
    assert program(attack="labels", attackers=0.1) == plain
    assert len({plain, program(attack="signs", attackers=0.3), program(attack="labels", attackers=0.3)}) == 3
