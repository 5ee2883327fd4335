"""A run in which everything happens at once, against the methods' own functions, one client after another.

Three networks are dealt 0, 0, 1, 2. In each round one client is not drawn, in the third one the message of another does
not arrive, some begin from earlier states of the server, and one client attacks in all of them.
"""

import jax
import numpy as np
import pytest
from problems import CLASSES, HYPER_PARAMETERS, SHAPE, diverging, tiny_model
from trees import assert_same, row

from pfl_jax import Settings, make_method, mixed, models, simulate
from pfl_jax.data import client_data
from pfl_jax.engine.asynchronous import Timetable
from pfl_jax.engine.cohort import attackers
from pfl_jax.primitives import score
from pfl_jax.streams import INITIALIZATION
from pfl_jax.testing.problems import UNEVEN, uneven_federation

KEY, DATA, NETWORKS = jax.random.key(4), uneven_federation(), (0, 0, 1, 2)
WIDTH = tiny_model().num_features
MODELS = [tiny_model(), *(models.mlp(SHAPE, CLASSES, hidden=(size, WIDTH)) for size in (5, 6))]
PLAN = Timetable(
    clients=np.array([[0, 1, 3], [1, 2, 3], [0, 1, 2], [0, 2, 3]]),
    staleness=np.array([[0, 0, 0], [1, 0, 0], [2, 0, 1], [0, 1, 3]]),
    seconds=np.arange(4),
)
LOST, SCALE = (2, 2), 2.0
"""Round and client of the message that does not arrive; and how far the attacker goes against its update."""

SETTINGS = {"rounds": 4, "timetable": PLAN, "attack": "signs", "attackers": 0.25, "attack_scale": SCALE}


def played(index):
    """LG-FedAvg, which shares heads; in one round a client's training ends in NaN."""

    def make(model):
        method = make_method("lg_fedavg", model, **HYPER_PARAMETERS)
        return diverging(method, UNEVEN[LOST[1]], when=index == LOST[0])

    return mixed(make, MODELS, NETWORKS)


def by_hand():
    """The shared heads and all backbones, before the first round and after each; and losses at the end."""
    (attacker,) = np.flatnonzero(attackers(KEY, 4, 0.25))
    # It has a network that another client has too.
    assert attacker == 1
    methods = mixed(lambda model: make_method("lg_fedavg", model, **HYPER_PARAMETERS), MODELS).methods
    servers = [one.init_server(jax.random.fold_in(jax.random.fold_in(KEY, INITIALIZATION), 4)) for one in methods]
    locals_ = [jax.jit(one.local) for one in methods]
    heads, backbones = [servers[0]["head"]], [[servers[network]["backbone"] for network in NETWORKS]]
    for index, (cohort, late) in enumerate(zip(PLAN.clients, PLAN.staleness, strict=True)):
        sent, own, key = {}, [*backbones[-1]], jax.random.fold_in(KEY, index)
        for client, tau in zip(cohort.tolist(), late.tolist(), strict=True):
            if (index, client) == LOST:
                continue
            network, begun = NETWORKS[client], heads[-1 - tau]
            server, examples = servers[network] | {"head": begun}, client_data(DATA, client, "train")
            result = locals_[network](jax.random.fold_in(key, client), server, own[client], examples)
            own[client], factor = result.client, (-SCALE if client == attacker else 1) / np.sqrt(1 + tau)
            sent[client] = jax.tree.map(
                lambda now, then, value, factor=factor: np.float64(now) + factor * (np.float64(value) - then),
                *(heads[-1], begun, result.message.value),
            )
        weights = [UNEVEN[client] for client in sent]
        heads.append(jax.tree.map(lambda *leaves, w=weights: np.average(leaves, 0, w), *sent.values()))
        backbones.append(own)
    deployed = [{"backbone": backbones[-1][client], "head": heads[-1]} for client in range(4)]
    losses = [
        score(methods[network].predict, deployed[client], client_data(DATA, client, "test"))["loss"]
        for client, network in enumerate(NETWORKS)
    ]
    return heads, backbones, losses


@pytest.mark.parametrize(
    ("chunk", "devices", "state_on"),
    [(1, 1, "device"), *(pytest.param(None, n, on, marks=pytest.mark.slow) for n, on in ((2, "device"), (1, "host")))],
)
def test_everything_at_once(chunk, devices, state_on):
    heads, backbones, losses = by_hand()
    mesh = simulate.client_mesh() if devices == 2 else None
    options = {"mesh": mesh, "state_on": state_on, "on_nan": "skip-client"}
    results = list(simulate.run(played, DATA, Settings(**SETTINGS, chunk=chunk), KEY, **options))
    assert [result.cohort[~result.arrived].tolist() for result in results] == [[], [], [LOST[1]], []]
    several, close = played(0), {"rtol": 2e-4, "atol": 2e-5}
    for index, result in enumerate(results, start=1):
        for network, server in enumerate(result.state.server):
            assert_same(server.plain["head"], heads[index], **close)
            # The latest of the earlier states comes first.
            for tau in range(1, 1 + min(index, 3)):
                assert_same(row(server.extra["head"], tau - 1), heads[index - tau], **close)
            for place, client in enumerate(several.members(network, 4)):
                assert_same(row(result.state.clients[network], place), backbones[index][client], **close)
    np.testing.assert_allclose(results[-1].received["loss"], losses, **close)
