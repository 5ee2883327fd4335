"""A server and clients that only exchange messages, against the simulation of the same run."""

import jax
import numpy as np
import pytest

import pfl_jax
from pfl_jax.data.federated import client_data
from pfl_jax.deploy import Deployment, Request
from pfl_jax.engine.asynchronous import Timetable
from pfl_jax.engine.communication import Traffic, traffic
from pfl_jax.errors import InvalidInput
from pfl_jax.methods import METHODS
from pfl_jax.networks import adapters
from pfl_jax.primitives.tree import byte_count
from pfl_jax.testing.problems import CLASSES, SHAPE, tiny_federation, tiny_model

KEY = jax.random.key(3)
FEDERATION = tiny_federation()
N = FEDERATION.num_clients

pytestmark = pytest.mark.without_f1_auc


def tiny_method(name, lr=0.1):
    return METHODS[name](tiny_model(), pfl_jax.LocalTraining(lr=lr, batch_size=4))


def deployed(method, **settings):
    settings = pfl_jax.Settings(**{"rounds": 3, "participation": 0.75, "chunk": 1} | settings)
    return Deployment(method, settings, KEY, N, client_data(FEDERATION, 0, "train"))


class Wire:
    """Carries messages to clients in this process, whose states are files in `folder`, and back, unless `lost`.

    lost: (completed rounds, client) -> whether a client's message of that round does not arrive.
    """

    def __init__(self, deployment, folder, lost=lambda completed, client: False):
        self.deployment, self.folder, self.lost = deployment, folder, lost

    def __call__(self, requests):
        answers = {client: self.one(client, request) for client, request in requests.items()}
        down, up = (byte_count(one) for one in ([one.arrays for one in requests.values()], list(answers.values())))
        kept = {
            client: arrays
            for client, arrays in answers.items()
            if requests[client].kind == "evaluate" or not self.lost(requests[client].round, client)
        }
        return kept, Traffic(up=up, down=down)

    def one(self, client, request):
        train, test = (client_data(FEDERATION, client, split) for split in ("train", "test"))
        return self.deployment.answer(client, request, train, test, self.folder / f"{client}.npz")


def assert_equal_runs(mine, other):
    """To rounding: servers, cohorts, who arrived, and the scores of all clients."""
    assert len(mine) == len(other) > 0
    for one, want in zip(mine, other, strict=True):
        np.testing.assert_array_equal(one.cohort, want.cohort)
        np.testing.assert_array_equal(one.arrived, want.arrived)
        for leaf, expected in zip(jax.tree.leaves(one.server), jax.tree.leaves(want.state.server), strict=True):
            np.testing.assert_allclose(leaf, expected, rtol=2e-5, atol=2e-6)
        assert (one.received is None) == (want.received is None)
        if one.received is not None:
            np.testing.assert_allclose(one.received["loss"], want.received["loss"], rtol=1e-4, atol=1e-5)


def test_frozen_parameters_are_an_argument_of_all_programs(tmp_path):
    model = adapters.lora(pfl_jax.models.mlp(SHAPE, CLASSES), SHAPE, rank=2, targets="fc1")
    method, traced = METHODS["ditto"](model, pfl_jax.LocalTraining(lr=0.1, batch_size=4)), []

    def watched(function):
        def call(*arguments):
            traced.extend(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(model.frozen.read()))
            return function(*arguments)

        return call

    names = ("init_client", "local", "aggregate", "personalize")
    deployment = deployed(method._replace(**{name: watched(getattr(method, name)) for name in names}), rounds=2)
    # Which leaves are read is seen from a jaxpr, that is not compiled.
    assert any(deployment._read_by_clients)
    traced.clear()
    mine = list(deployment.rounds(Wire(deployment, tmp_path)))
    assert traced
    assert all(traced)
    assert_equal_runs(mine, list(pfl_jax.run(method, FEDERATION, deployment.settings, KEY)))


@pytest.mark.parametrize(
    "name",
    [
        "hypcluster",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("fedavg", "fedrep", "ditto", "pfedme", "fedproto_g")),
    ],
)
def test_ten_rounds_equal_the_simulation(name, tmp_path):
    """Also the bytes: what clients read of the server's state is what the method downloads."""
    method = tiny_method(name)
    deployment = deployed(method, rounds=10, eval_every=5)
    mine = list(deployment.rounds(Wire(deployment, tmp_path)))
    assert_equal_runs(mine, list(pfl_jax.run(method, FEDERATION, deployment.settings, KEY)))
    counted, clients = traffic(method, FEDERATION), len(mine[0].cohort)
    assert clients == 3
    assert {one.traffic.down for one in mine} == {clients * counted.down}
    # Besides: the number of examples, and the scalar weight of each mean.
    assert {one.traffic.up for one in mine} <= {clients * (counted.up + 4 + 4 * weights) for weights in range(3)}


def test_a_client_whose_message_is_lost_is_a_drop_out_of_the_simulation(tmp_path):
    """It keeps the state after its training, and SCAFFOLD's control variate changes only when a message arrives."""
    scaffold = tiny_method("scaffold")

    def aggregate(key, server, clients, messages, cohort):
        server, clients, info = scaffold.aggregate(key, server, clients, messages, cohort)
        return jax.tree.map(lambda leaf: leaf + 1e-3 * cohort.present.sum(), server), clients, info

    method = scaffold._replace(aggregate=aggregate)
    dropping = pfl_jax.Settings(rounds=5, participation=0.75, drop_rate=0.34, chunk=1)
    want = list(pfl_jax.run(method, FEDERATION, dropping, KEY))
    gone = {(one.round - 1, int(client)) for one in want for client in one.cohort[~one.arrived]}
    assert len(gone) == 5
    deployment = deployed(method, rounds=5)
    mine = list(deployment.rounds(Wire(deployment, tmp_path, lambda *message: message in gone)))
    assert_equal_runs(mine, want)


def test_without_any_message_the_server_keeps_its_state(tmp_path):
    deployment = deployed(tiny_method("fedper"))
    wire = Wire(deployment, tmp_path, lambda completed, client: completed == 1)
    first, second, third = deployment.rounds(wire)
    assert not second.arrived.any()
    jax.tree.map(np.testing.assert_array_equal, first.server, second.server)
    assert third.arrived.all()


def test_a_client_that_diverges_sends_nothing_and_keeps_its_state(tmp_path):
    deployment = deployed(tiny_method("fedper", lr=3e38), rounds=1)
    (only,) = deployment.rounds(Wire(deployment, tmp_path))
    assert not only.arrived.any()
    assert not list(tmp_path.iterdir())


def test_a_server_that_diverges_ends_the_run(tmp_path):
    method = tiny_method("fedper")

    def aggregate(key, server, clients, messages, cohort):
        return jax.tree.map(lambda leaf: leaf / 0, server), clients, {}

    deployment = deployed(method._replace(aggregate=aggregate))
    with pytest.raises(pfl_jax.Diverged, match="round 1: what the server computed"):
        next(deployment.rounds(Wire(deployment, tmp_path)))


def test_a_schedule_is_that_of_the_simulation(tmp_path):
    deployment = deployed(lambda round: tiny_method("fedavg", lr=0.1 / (1 + round)), rounds=2)
    mine = list(deployment.rounds(Wire(deployment, tmp_path)))
    assert_equal_runs(mine, list(pfl_jax.run(deployment.method, FEDERATION, deployment.settings, KEY)))


@pytest.mark.parametrize("name", ["fedamp", "fedpac", "apple", "pfedhn"])
def test_a_server_that_needs_the_states_of_clients_is_refused(name):
    with pytest.raises(InvalidInput, match="cannot be deployed: its server reads or computes states of clients"):
        deployed(tiny_method(name))


def test_a_server_that_only_reads_the_states_is_refused():
    method = tiny_method("ditto")
    reading = method._replace(
        aggregate=lambda key, server, clients, messages, cohort: (
            jax.tree.map(lambda leaf, own: leaf + own.mean(0), messages.value, clients),
            clients,
            {},
        )
    )
    with pytest.raises(InvalidInput, match="reads or computes"):
        deployed(reading)
    # What the info shows of them is no matter.
    deployed(tiny_method("apfl"))


def test_a_survey_and_simulated_failures_are_refused():
    with pytest.raises(InvalidInput, match="asks all clients before the first round"):
        deployed(tiny_method("feddbe"))
    with pytest.raises(InvalidInput, match="its clients have several networks"):
        deployed(pfl_jax.mixed(lambda model: METHODS["lg_fedavg"](model), [tiny_model()] * 2))
    two = Timetable(np.array([[0, 1]]), np.zeros((1, 2), int), np.ones(1))
    for option in (
        {"drop_rate": 0.3},
        {"attack": "signs", "attackers": 0.3},
        {"before_aggregation": True},
        {"rounds": 1, "participation": 1.0, "timetable": two},
    ):
        with pytest.raises(InvalidInput, match="for simulations only"):
            deployed(tiny_method("fedavg"), **option)


def test_wrong_messages_and_files_are_refused(tmp_path):
    deployment = deployed(tiny_method("fedper"))
    wire = Wire(deployment, tmp_path)
    sent = []

    def listen(requests):
        sent.extend(one for one in requests.items() if one[1].kind == "train")
        return wire(requests)

    list(deployment.rounds(listen))
    client, request = sent[-1]
    with pytest.raises(InvalidInput, match="is trained already"):
        wire.one(client, request)
    with pytest.raises(InvalidInput, match="is of another run"):
        Wire(deployed(tiny_method("fedavg")), tmp_path).one(client, request)
    less = Request("train", 9, 0, {})
    with pytest.raises(InvalidInput, match=r"the request is of another run: its 0/backbone/.* is nothing"):
        wire.one(client, less)
    file = tmp_path / f"{client}.npz"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(InvalidInput, match="not a state of this client"):
        wire.one(client, request._replace(round=9))
