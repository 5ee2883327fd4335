"""Limits of FedProx, SCAFFOLD, LG-FedAvg, FedRep, FedBABU, Fed-RoD, Ditto, pFedMe and APFL that are other methods."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import CLASSES, HYPER_PARAMETERS, tiny_federation, tiny_model
from rounds import last_round
from trees import assert_same, distance, row

from pfl_jax import simulate
from pfl_jax.data.federated import client_data
from pfl_jax.engine.simulate import Settings
from pfl_jax.methods import make_method
from pfl_jax.methods.apfl import apfl
from pfl_jax.methods.ditto import ditto
from pfl_jax.methods.fedavg import fedavg
from pfl_jax.methods.fedavg_ft import fedavg_ft
from pfl_jax.methods.fedbabu import fedbabu
from pfl_jax.methods.fedem_ft import fedem_ft
from pfl_jax.methods.fedpac import fedpac
from pfl_jax.methods.fedprox import fedprox
from pfl_jax.methods.fedprox_ft import fedprox_ft
from pfl_jax.methods.fedrep import fedrep
from pfl_jax.methods.fedrod import fedrod
from pfl_jax.methods.lg_fedavg import lg_fedavg
from pfl_jax.methods.local import local
from pfl_jax.methods.pfedme import pfedme
from pfl_jax.methods.scaffold import ScaffoldClient, effective_steps, scaffold

pytestmark = pytest.mark.without_f1_auc

implied = pytest.mark.slow
"""For limits of what test_shared_model_equations.py compares with float64, method by method: by default that is run."""


def federation(sizes, balanced):
    """Tiny clients; balanced ones have as many examples of each class as of any other."""
    data = tiny_federation(sizes)
    if not balanced:
        return data
    labels = np.array(data.y)
    for client, count in enumerate(sizes):
        labels[np.asarray(data.train_index)[client, :count]] = np.arange(count) % CLASSES
    return data._replace(y=jnp.asarray(labels))


@functools.cache
def run(factory, rounds=3, sizes=(9, 20, 14, 5), balanced=False, participation=1.0, **hyper_parameters):
    """The last round; every method trains with the same optimizer unless told otherwise."""
    sgd = {"momentum": 0.5, "weight_decay": 5e-4, **HYPER_PARAMETERS}
    return last_round(factory, federation(sizes, balanced), 5, rounds, participation, **{**sgd, **hyper_parameters})


def assert_same_run(left, right):
    """Same global model, same losses under both protocols."""
    assert_same(left.state.server, right.state.server)
    assert_same((left.received["loss"], left.trained["loss"]), (right.received["loss"], right.trained["loss"]))


@implied
def test_fedprox_without_the_term_is_fedavg_and_with_it_moves_less():
    plain = run(fedavg, rounds=1)
    assert_same_run(run(fedprox, mu=0.0), run(fedavg))
    start = run(fedavg, rounds=1, lr=0.0).state.server
    held = run(fedprox, rounds=1, mu=2.0)
    assert distance(held.state.server, start) < 0.7 * distance(plain.state.server, start)
    assert distance(run(fedprox, rounds=1).state.server, plain.state.server) > 0


@implied
def test_fedprox_ft_trains_like_fedprox_and_tunes_like_fedavg_ft():
    # One round only: later everything is right with and without tuning.
    prox = run(fedprox, rounds=1, mu=0.5)
    tuned, untuned = (run(fedprox_ft, rounds=1, mu=0.5, finetune_epochs=epochs) for epochs in (5, 0))
    assert_same(tuned.state.server, prox.state.server)
    assert_same(untuned.received["loss"], prox.received["loss"])
    assert (np.abs(tuned.received["loss"] - prox.received["loss"]) > 1e-2).all()
    assert_same_run(run(fedprox_ft, rounds=1, mu=0.0), run(fedavg_ft, rounds=1))


@pytest.mark.parametrize(
    "factory", [fedavg_ft, *(pytest.param(one, marks=pytest.mark.slow) for one in (fedprox_ft, fedem_ft, fedbabu))]
)
def test_fine_tuning_has_as_many_epochs_as_training_unless_told(factory):
    def program(**epochs):
        """What a client deploys, as text: nothing need be compiled to see that two programs are the same."""

        def deployed(examples):
            method = make_method(factory, tiny_model(), lr=0.1, batch_size=8, **epochs)
            server = method.init_server(jax.random.key(0))
            client = method.init_client(jax.random.key(1), server, examples)
            return method.personalize(jax.random.key(2), server, client, examples)

        return jax.jit(deployed).lower(client_data(tiny_federation(), 1, "train")).as_text()

    assert program(epochs=1) == program(epochs=1, finetune_epochs=1)
    assert program(epochs=3) == program(epochs=3, finetune_epochs=3) == program(epochs=1, finetune_epochs=3)
    assert program(epochs=1) != program(epochs=3)


@implied
def test_scaffold_starts_as_fedavg():
    # FedAvg weighs clients by their examples, SCAFFOLD all alike: the same for clients of equal size.
    equal = {"sizes": (12, 12, 12)}
    first = run(scaffold, rounds=1, **equal)
    assert_same(first.state.server.params, run(fedavg, rounds=1, **equal).state.server)
    # From the second round on the control variates count.
    second, other = (run(factory, rounds=2, **equal).state.server for factory in (scaffold, fedavg))
    assert distance(second.params, other) > 1e-5


@pytest.mark.slow
def test_scaffold_weighs_clients_alike_whatever_their_sizes():
    data = tiny_federation()
    engine = simulate.build(make_method(scaffold, tiny_model(), **HYPER_PARAMETERS), Settings(rounds=1)).jit()
    state = engine.init(data, jax.random.key(5))
    method, alone = make_method(fedavg, tiny_model(), **HYPER_PARAMETERS), []
    for client in range(4):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(5), 0), client)
        alone.append(method.local(key, state.server.params, (), client_data(data, client, "train")).message.value)
    state, _ = engine.round(data, state, 4)
    assert_same(state.server.params, jax.tree.map(lambda *leaves: sum(leaves) / 4, *alone))


@pytest.mark.parametrize("traced", [pytest.param(False, marks=pytest.mark.slow), True])
def test_scaffold_without_a_learning_rate_stands_still(traced):
    data, examples = tiny_federation(), client_data(tiny_federation(), 1, "train")

    def train(lr):
        method = make_method(scaffold, tiny_model(), **{**HYPER_PARAMETERS, "lr": lr})
        server = method.init_server(jax.random.key(0))
        # As in a later round: controls that are not zero.
        server = server._replace(control=jax.tree.map(jnp.ones_like, server.control))
        twice = jax.tree.map(lambda leaf: 2 * jnp.ones_like(leaf), server.control)
        client = ScaffoldClient(twice, twice)
        result = method.local(jax.random.key(2), server, client, examples)
        return server, client, result

    server, client, result = jax.jit(train)(0.0) if traced else train(0.0)
    assert_same(result.client, client)
    assert_same(result.message.value.params, server.params)
    assert float(sum(jnp.abs(leaf).sum() for leaf in jax.tree.leaves(result.message.value.control_change))) == 0
    method = make_method(scaffold, tiny_model(), **{**HYPER_PARAMETERS, "lr": 0.0})
    *_, last = simulate.run(method, data, Settings(rounds=2), jax.random.key(5))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(last.state.server))
    assert_same(last.state.server.params, run(fedavg, rounds=1, lr=0.0).state.server)


@implied
def test_scaffold_of_one_client_is_fedavg():
    one = {"sizes": (20,), "rounds": 4}
    scaffold_run, fedavg_run = run(scaffold, **one), run(fedavg, **one)
    assert_same(scaffold_run.state.server.params, fedavg_run.state.server)
    assert_same(scaffold_run.received["loss"], fedavg_run.received["loss"])


def test_scaffold_counts_each_clients_own_steps():
    data, lr, batch_size = tiny_federation(), 0.05, 4
    method = make_method(scaffold, tiny_model(), lr=lr, momentum=0.0, batch_size=batch_size, epochs=2)
    server = method.init_server(jax.random.key(0))
    local = jax.jit(method.local)
    for client, steps in enumerate((6, 10, 8, 4)):
        start = ScaffoldClient(server.control, server.control)
        message = local(jax.random.key(1), server, start, client_data(data, client, "train")).message.value
        moved = jax.tree.map(lambda a, b, s=steps: (a - b) / (s * lr), server.params, message.params)
        chex.assert_trees_all_close(message.control_change, moved, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_scaffold_stores_control_variates_and_the_server_has_their_mean(participation):
    state = run(scaffold, participation=participation).state
    chex.assert_trees_all_close(
        state.server.control, jax.tree.map(lambda leaf: leaf.mean(0), state.clients.control), rtol=1e-4, atol=1e-6
    )
    norms = jax.vmap(lambda control: sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(control)))(state.clients.control)
    # NaN until a client's first training.
    trained = ~np.isnan(np.asarray(state.trained["accuracy"]))
    np.testing.assert_array_equal(np.asarray(norms) > 1e-6, trained)


def test_scaffolds_control_variates_settle_with_momentum():
    # Divided by the number of steps alone they would grow threefold a round here, without end.
    data = tiny_federation()
    method = make_method(scaffold, tiny_model(), lr=0.05, momentum=0.9, batch_size=32, epochs=10)
    engine = simulate.build(method, Settings(rounds=1)).jit()
    state, changes = engine.init(data, jax.random.key(0)), []
    for _ in range(8):
        before = jax.tree.map(jnp.copy, state.clients)
        state, _ = engine.round(data, state, 4)
        changes.append(distance(before, state.clients))
    assert changes[-1] < 0.01 * changes[0]


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_effective_steps(momentum):
    for steps in (0, 1, 7):
        want, velocity = 0.0, 0.0
        for _ in range(steps):
            velocity = momentum * velocity + 1
            want += velocity
        np.testing.assert_allclose(effective_steps(jnp.int32(steps), momentum), want, rtol=1e-5, atol=1e-6)


@implied
def test_lg_fedavg_of_one_client_is_local():
    shared, alone = run(lg_fedavg, sizes=(20,)), run(local, sizes=(20,))
    own = row(alone.state.clients, 0)
    assert_same(shared.state.server["head"], own["head"])
    assert_same(row(shared.state.clients, 0), own["backbone"])
    assert_same(shared.received["loss"], alone.received["loss"])


@implied
def test_fedrep_is_fedpac_without_both_parts():
    head = {"head_lr": 0.3, "head_epochs": 3}
    rep, pac = run(fedrep, **head), run(fedpac, alignment=False, collaboration=False, **head)
    assert_same(rep.state.server["backbone"], pac.state.server.backbone)
    assert_same(rep.state.clients, pac.state.clients)
    assert_same(rep.received["loss"], pac.received["loss"])


@pytest.mark.slow
def test_fedrep_takes_the_backbones_rate_for_the_head_unless_told():
    assert_same(run(fedrep).state.clients, run(fedrep, head_lr=0.1).state.clients)
    assert distance(run(fedrep).state.clients, run(fedrep, head_lr=0.3).state.clients) > 1e-3


@implied
def test_fedbabu_trains_like_fedrep_whose_heads_never_move():
    # FedRep splits its key between head and backbone: with full batches, order is all that keys decide.
    babu = run(fedbabu, batch_size=32, finetune_epochs=0, weight_decay=0.1)
    rep = run(fedrep, batch_size=32, head_epochs=0, weight_decay=0.1)
    assert_same_run(babu, rep)


@implied
def test_fedbabu_never_moves_its_head_but_fine_tunes_it():
    first, last = (run(fedbabu, rounds=rounds, weight_decay=0.1).state.server for rounds in (1, 3))
    chex.assert_trees_all_equal(first["head"], last["head"])
    assert distance(first["backbone"], last["backbone"]) > 1e-3
    data = tiny_federation()
    method = make_method(fedbabu, tiny_model(), **HYPER_PARAMETERS)
    examples = client_data(data, 0, "train")
    tuned = method.personalize(jax.random.key(0), last, (), examples)
    assert distance(tuned["head"], last["head"]) > 1e-4
    assert distance(tuned["backbone"], last["backbone"]) > 1e-4


@implied
def test_fedrod_of_balanced_clients_shares_fedavgs_model():
    equal = {"sizes": (9, 6, 12), "balanced": True}
    # The personal heads train along and leave no trace in what is shared.
    assert_same(run(fedrod, **equal).state.server, run(fedavg, **equal).state.server)
    assert distance(run(fedrod).state.server, run(fedavg).state.server) > 1e-4


@implied
def test_dittos_global_model_is_fedavgs():
    for lam in (0.0, 1.0):
        assert_same(run(ditto, lam=lam).state.server, run(fedavg).state.server)


@implied
def test_ditto_without_the_pull_is_local():
    # Its personal models have batches of their own: with full batches, order is all that keys decide.
    alone, pulled = run(local, batch_size=32), run(ditto, batch_size=32, lam=0.0, personal_epochs=2)
    assert_same(pulled.state.clients, alone.state.clients)
    assert_same((pulled.received["loss"], pulled.trained["loss"]), (alone.received["loss"], alone.trained["loss"]))


@implied
def test_pfedme_of_single_full_steps_is_fedavg():
    # With lr lambda = 1 every step of w_i lands on t, so that the next pull is zero.
    me = run(pfedme, momentum=0.0, lr=0.1, lam=10.0, inner_steps=1, personal_lr=0.05)
    assert_same(me.state.server, run(fedavg, lr=0.05, momentum=0.0).state.server)


@implied
def test_pfedme_without_the_pull_never_moves_the_server():
    server = run(pfedme, momentum=0.0, lam=0.0).state.server
    assert_same(server, run(fedavg, rounds=1, lr=0.0).state.server)
    # And the personal models are found anew from it in every round.
    assert_same(
        run(pfedme, momentum=0.0, lam=0.0, batch_size=32).state.clients,
        run(pfedme, momentum=0.0, lam=0.0, batch_size=32, rounds=1).state.clients,
    )


@implied
def test_pfedme_server_rate_scales_the_servers_step():
    start = run(fedavg, rounds=1, lr=0.0).state.server
    full, half = (
        run(pfedme, momentum=0.0, rounds=1).state.server,
        run(pfedme, momentum=0.0, rounds=1, server_lr=0.5).state.server,
    )
    assert_same(half, jax.tree.map(lambda a, b: (a + b) / 2, start, full))


@implied
def test_apfls_shared_model_is_fedavgs_and_alpha_zero_deploys_it():
    plain = run(fedavg)
    assert_same_run(run(apfl, alpha=0.0), plain)
    assert_same(run(apfl, alpha=0.25).state.server, plain.state.server)


@implied
def test_apfl_with_alpha_one_is_local():
    own, alone = run(apfl, alpha=1.0), run(local)
    assert_same(own.state.clients.own, alone.state.clients)
    assert_same((own.received["loss"], own.trained["loss"]), (alone.received["loss"], alone.trained["loss"]))


@pytest.mark.slow
def test_apfl_learns_alpha_within_its_bounds_if_told_to():
    np.testing.assert_allclose(run(apfl).state.clients.alpha, [0.25] * 4)
    learned = np.asarray(run(apfl, adaptive=True, alpha=0.5).state.clients.alpha)
    assert len(np.unique(learned)) == 4
    assert ((learned >= 0) & (learned <= 1)).all()
    edge = np.asarray(run(apfl, adaptive=True, alpha=1.0, lr=2.0).state.clients.alpha)
    assert ((edge >= 0) & (edge <= 1)).all()


TRACED = [
    (fedprox, "mu", (0.0, 1.0)),
    (fedrep, "head_lr", (0.05, 0.2)),
    (scaffold, "momentum", (0.0, 0.6)),
    (ditto, "lam", (0.0, 2.0)),
    (pfedme, "lam", (1.0, 5.0)),
    (pfedme, "personal_lr", (0.02, 0.1)),
    (apfl, "alpha", (0.0, 0.7)),
]


# By default every comparison of a file that uses `rounds.last_round` traces the method's real numbers.
@pytest.mark.slow
@pytest.mark.parametrize(("factory", "argument", "values"), TRACED, ids=lambda case: getattr(case, "__name__", None))
def test_numbers_may_be_traced(factory, argument, values):
    examples = client_data(tiny_federation(), 1, "train")

    def train(value):
        method = make_method(factory, tiny_model(), **{**HYPER_PARAMETERS, argument: value})
        server = method.init_server(jax.random.key(0))
        client = method.init_client(jax.random.key(1), server, examples)
        return method.local(jax.random.key(2), server, client, examples)

    both = jax.jit(jax.vmap(train))(jnp.array(values))
    assert_same(row(both, 1), train(values[1]))
    assert distance(row(both, 0), row(both, 1)) > 1e-5
