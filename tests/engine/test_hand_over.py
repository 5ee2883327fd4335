"""Turns of clients: what one passes on, to whom, in rounds and evaluations, wherever clients and their states are."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from problems import tiny_federation, tiny_model
from trees import assert_flat

import pfl_jax
from pfl_jax import Settings, mixed, simulate
from pfl_jax.base import HandOver, LocalResult, Mean, Method
from pfl_jax.cross_evaluation import cross_scores
from pfl_jax.data.federated import hold_out
from pfl_jax.engine import hand_over, placement, rounds
from pfl_jax.engine.body import chain_of, round_programs
from pfl_jax.errors import InvalidInput
from pfl_jax.methods import make_method
from pfl_jax.wrappers.compression import Compression, compressed

KEY = jax.random.key(7)
SIZES = (9, 20, 14, 5, 11, 3, 17)


def trail(personalize=True):
    """A server of a number 10; clients append their sizes to it as digits, and send what they had."""

    def append(key, server, client, data):
        return 100 * server + jnp.sum(data.mask)

    def local(key, server, client, data):
        return LocalResult(server, (Mean(server, jnp.ones(())), server), server)

    def aggregate(key, server, clients, messages, cohort):
        return server, clients, {"had": messages[1], "mean": messages[0].value}

    return Method(
        init_server=lambda key: jnp.float32(1.0),
        init_client=lambda key, server, data: jnp.float32(0.0),
        local=local,
        aggregate=aggregate,
        personalize=lambda key, server, client, data: server,
        predict=lambda personal, inputs: jnp.full((inputs.shape[0], 3), personal),
        hand_over=HandOver(append, append if personalize else None),
    )


def fedas(**options):
    return make_method("fedas", tiny_model(), lr=0.1, batch_size=8, epochs=2, manner="in_turn", **options)


@pytest.mark.parametrize("mesh", [None, 2])
def test_clients_get_what_the_one_before_has_in_the_order_of_their_numbers(mesh):
    mesh = None if mesh is None else simulate.client_mesh()
    (result,) = pfl_jax.run(trail(), tiny_federation((9, 20, 14)), Settings(rounds=1), KEY, mesh=mesh)
    assert np.asarray(result.info["had"]).tolist() == [109.0, 10920.0, 1092014.0]
    assert float(result.info["mean"]) == np.float32((109 + 10920 + 1092014) / 3)
    assert np.asarray(result.state.clients).tolist() == [109.0, 10920.0, 1092014.0]
    assert float(result.state.server) == 1.0


def test_who_drops_out_trains_and_passes_nothing_on():
    settings = Settings(rounds=1, drop_rate=1 / 3)
    (result,) = pfl_jax.run(trail(), tiny_federation((9, 20, 14)), settings, KEY)
    carried, wanted = 1, []
    for size, arrived in zip((9, 20, 14), result.arrived.tolist(), strict=True):
        wanted.append(100 * carried + size)
        carried = wanted[-1] if arrived else carried
    assert result.arrived.sum() == 2
    assert np.asarray(result.state.clients).tolist() == wanted


def played(block, devices=None):
    """Rounds in blocks of so many clients, on two devices that share the clients or own them."""
    data, mesh = tiny_federation(SIZES), None if devices is None else simulate.client_mesh()
    settings = Settings(rounds=2, participation=3 / 7, drop_rate=0.3, chunk=1 if block == 1 else 2)
    data = placement.place(data, mesh) if devices == "own" else data
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hand_over, "BLOCK", block)
        return list(pfl_jax.run(trail(), data, settings, KEY, mesh=mesh))


in_one_block = functools.cache(lambda: played(32))


@pytest.mark.parametrize(("block", "devices"), [(1, None), (2, None), (1, "shared"), (2, "own"), (32, "own")])
def test_blocks_devices_and_chunks_change_nothing(block, devices):
    for one, other in zip(played(block, devices), in_one_block(), strict=True):
        chex.assert_trees_all_equal(one.state._replace(key=()), other.state._replace(key=()))
        chex.assert_trees_all_equal(one.received, other.received)
        chex.assert_trees_all_equal(one.info, other.info)


def test_chains_of_an_evaluation_are_whole_where_states_are_elsewhere(monkeypatch):
    data, settings = tiny_federation(SIZES), Settings(rounds=1, participation=2 / 7)
    (wanted,) = pfl_jax.run(trail(), data, settings, KEY)
    for place, blocks in (("host", 256), ("host", 3), ("disk", 3)):
        monkeypatch.setattr(rounds, "BLOCK", blocks)
        (got,) = pfl_jax.run(trail(), data, settings, KEY, state_on=place)
        np.testing.assert_array_equal(got.received["loss"], wanted.received["loss"])


def deployed(method, data, settings):
    """What each client deploys, one after another."""
    (result,) = pfl_jax.run(method, data, settings, KEY)
    (program,) = round_programs(method, settings, None)
    found = []
    for client in range(data.num_clients):
        _, server, chain = chain_of(method, settings, result.state, data.num_clients, client)
        found.append(float(program.personal(data, server, KEY, result.state.round, chain)))
    return found


def test_an_evaluation_has_cohorts_of_the_usual_size():
    data, settings = tiny_federation(SIZES), Settings(rounds=1, participation=2 / 7)
    assert deployed(trail(), data, settings) == [109, 10920, 114, 11405, 111, 11103, 117]
    assert deployed(trail(personalize=False), data, settings) == [1.0] * 7


@pytest.mark.without_f1_auc
def test_a_single_client_s_model_is_that_of_its_scores():
    data, settings = tiny_federation(SIZES), Settings(rounds=2, participation=3 / 7)
    *_, last = pfl_jax.run(fedas(), data, settings, KEY)
    scores = cross_scores(fedas(), data, last.state, settings=settings)
    np.testing.assert_allclose(np.diagonal(scores["loss"]), last.received["loss"], rtol=1e-5)


def test_newcomers_are_cohorts_of_one():
    data, new = hold_out(tiny_federation(SIZES), 2)
    (result,) = pfl_jax.run(trail(), data, Settings(rounds=1), KEY, newcomers=new)
    (other,) = pfl_jax.run(trail(), tiny_federation(SIZES), Settings(rounds=1, participation=1 / 7), KEY)
    for scores in result.newcomers:
        np.testing.assert_array_equal(scores["loss"], other.received["loss"][-2:])


@pytest.mark.without_f1_auc
def test_a_sweep_is_its_single_runs():
    data, settings = tiny_federation((9, 20, 14)), Settings(rounds=2, participation=2 / 3)

    def method(align_lr):
        return fedas(align_lr=align_lr)

    rates = jnp.array([0.05, 0.2])
    keys = jax.vmap(jax.random.key)(jnp.array([7, 7]))
    *_, swept = pfl_jax.sweep.run(method, data, settings, keys, {"align_lr": rates})
    for index, rate in enumerate(rates.tolist()):
        *_, alone = pfl_jax.run(method(rate), data, settings, KEY)
        np.testing.assert_allclose(swept.received["loss"][index], alone.received["loss"], rtol=1e-4)


@pytest.mark.without_f1_auc
def test_with_labels_of_an_attacker_the_others_get_another_backbone():
    data = tiny_federation((9, 20, 14))
    options = {"target": "class_mean", "align_loss": "class_sum", "first_alignment": True}
    settings = Settings(rounds=2, attack="labels", attackers=1 / 3)
    found = [list(pfl_jax.run(fedas(**options), data, one, KEY)) for one in (settings, Settings(rounds=2))]
    assert not np.allclose(found[0][-1].trained["loss"], found[1][-1].trained["loss"])


@pytest.mark.without_f1_auc
def test_clients_of_one_network_take_turns_among_themselves():
    method = mixed(lambda model: trail(), [tiny_model(), tiny_model()], (0, 1, 0, 0))
    (result,) = pfl_jax.run(method, tiny_federation((9, 20, 14, 5)), Settings(rounds=1), KEY)
    assert [np.asarray(one).tolist() for one in result.state.clients] == [[109.0, 10914.0, 1091405.0], [120.0]]


@pytest.mark.without_f1_auc
def test_wrappers_pass_on_what_the_method_does():
    data, settings = tiny_federation((9, 20, 14)), Settings(rounds=3)
    *_, plain = pfl_jax.run(fedas(), data, settings, KEY)
    *_, wrapped = pfl_jax.run(compressed(fedas(), Compression("topk:1.0")), data, settings, KEY)
    np.testing.assert_allclose(wrapped.received["loss"], plain.received["loss"], rtol=1e-4)


@pytest.mark.without_f1_auc
def test_cyclic_weight_transfer_to_one_client_is_fedavg():
    data, settings = tiny_federation(SIZES), Settings(rounds=3, participation=1 / 7)
    options = {"lr": 0.1, "batch_size": 8, "epochs": 2}
    methods = [make_method(name, tiny_model(), **options) for name in ("cyclic_weight_transfer", "fedavg")]
    cyclic, fedavg = (list(pfl_jax.run(method, data, settings, KEY))[-1] for method in methods)
    chex.assert_trees_all_close(cyclic.state.server, fedavg.state.server, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(cyclic.trained["loss"], fedavg.trained["loss"], rtol=1e-5)


@pytest.mark.without_f1_auc
def test_cyclic_weight_transfer_against_numpy():
    data = tiny_federation((9, 20, 14))
    method = make_method(
        "cyclic_weight_transfer", tiny_model(), lr=0.2, momentum=0.0, weight_decay=0.0, batch_size=32, epochs=2
    )
    settings = Settings(rounds=2, drop_rate=1 / 3)
    w = reference.to_numpy(simulate.build(method, settings).init(data, KEY).server)
    for result in pfl_jax.run(method, data, settings, KEY):
        for client in result.cohort[result.arrived].tolist():
            x, y = reference.examples(data, client)
            w = reference.descend(w, lambda w: reference.cross_entropy_gradient(w, x, y), 2, 0.2)  # noqa: B023
        assert_flat(reference.to_numpy(result.state.server), w, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(("name", "value"), [("eval_clients", 2)])
def test_settings_that_cut_a_chain_are_refused(name, value):
    with pytest.raises(InvalidInput, match=f"{name} cannot be given: clients of this method take turns"):
        pfl_jax.run(trail(), tiny_federation((9, 20, 14)), Settings(rounds=1, **{name: value}), KEY)
