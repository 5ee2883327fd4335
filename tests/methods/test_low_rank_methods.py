"""Methods for low-rank adapters: their equations in float64 NumPy, and their limits, such as without adapters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import adapted_model
from trees import assert_same, distance

from pfl_jax import LocalTraining, Settings, build, methods, models
from pfl_jax.data import client_data
from pfl_jax.messages import map_means
from pfl_jax.methods import METHODS
from pfl_jax.methods.fedex_lora import ExactParams
from pfl_jax.networks import adapters, split
from pfl_jax.primitives import keep_ranks, supervised_loss
from pfl_jax.streams import PERSONAL_MODEL
from pfl_jax.testing import conformance
from pfl_jax.testing.problems import SHAPE, tiny_federation, tiny_model
from pfl_jax.wrappers.attacks import attacked

TRAINING = LocalTraining(lr=0.1, batch_size=8, epochs=2)
RANK, SCALE = 3, 2.0
adapted = functools.partial(adapted_model, RANK, SCALE)


def played(factory, rounds=2, model=None, infos=None, **options):
    """The method, and the states after each round; nothing is evaluated. `infos` takes what the rounds report."""
    method, data = factory(adapted() if model is None else model, TRAINING, **options), tiny_federation()
    engine = build(method, Settings(rounds=rounds)).jit()
    data, states = data.with_frozen(method.frozen), []
    for _ in range(rounds):
        state = states[-1] if states else engine.init(data, jax.random.key(0))
        state, outcome = engine.round(data, state, 4)
        states.append(state)
        if infos is not None:
            infos.append(outcome.info)
    return method, states


def double(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


def trained_from(method, state, clients):
    """What all clients, in these states, train in the third round."""
    key, data, local = jax.random.fold_in(state.key, 2), tiny_federation(), jax.jit(method.local)
    return [
        local(jax.random.fold_in(key, number), state.server, own, client_data(data, number, "train"))
        for number, own in enumerate(clients)
    ]


@pytest.mark.parametrize(
    ("name", "other"),
    [("fedsa_lora", "fedper"), *((name, "fedavg") for name in ("fedex_lora", "hetlora", "flora", "flexlora"))],
)
def test_without_adapters_they_are_another_method(name, other):
    _, own = played(METHODS[name], model=tiny_model())
    _, base = played(METHODS[other], model=tiny_model())
    got = own[-1].server
    got = got.params if isinstance(got, ExactParams) else got
    assert_same(got, base[-1].server)


# FedEx-LoRA and FLoRA


def kernels(base, params, residuals=None):
    """W + R + s A B of the layers fc1 and fc2, in float64."""
    found = []
    for index, name in enumerate(("fc1", "fc2")):
        own, kernel = double(params["backbone"][name]), double(base[name]["kernel"])
        residual = 0.0 if residuals is None else double(residuals[index])
        found.append(kernel + SCALE * (own["lora_a"] @ own["lora_b"] + residual))
    return found


@pytest.mark.parametrize("name", ["fedex_lora", "flora"])
def test_the_kernels_are_averaged_exactly(name):
    model, infos = adapted(), []
    method, states = played(METHODS[name], rounds=3, model=model, infos=infos)
    base, federation = model.frozen.read()["base"], tiny_federation()
    before, after = states[1], states[2]
    weights = np.asarray(federation.train_count) / np.asarray(federation.train_count).sum()
    trained = trained_from(method, before, [()] * 4 if name == "fedex_lora" else before.clients)
    sent = [kernels(base, local.personal.params, local.personal.residuals) for local in trained]
    wanted = [sum(w * own[layer] for w, own in zip(weights, sent, strict=True)) for layer in range(2)]
    got = kernels(base, after.server.params, after.server.residuals)
    apart = kernels(base, after.server.params, before.server.residuals)
    for layer in range(2):
        np.testing.assert_allclose(got[layer], wanted[layer], rtol=1e-5, atol=1e-6)
        # Without the residual of this round it would not be.
        assert np.abs(apart[layer] - wanted[layer]).max() > 1e-5
    if name == "fedex_lora":
        lengths = [np.linalg.norm(residual) for residual in double(after.server.residuals)]
        np.testing.assert_allclose(infos[-1]["residual"], np.linalg.norm(lengths), rtol=1e-5)
    # And the model computes with these kernels.
    x = jnp.ones((2, *SHAPE))
    states = np.ones((2, 6))
    for layer, name in enumerate(("fc1", "fc2")):
        states = np.maximum(states @ got[layer] + double(base[name]["bias"]), 0)
    head = double(after.server.params["head"])
    np.testing.assert_allclose(
        method.predict(after.server, x), states @ head["kernel"] + head["bias"], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("rank", [1, 3])
def test_flora_s_clients_train_new_adapters_of_their_ranks(rank):
    # Nothing is trained: what a client has is what it begins with.
    method = methods.flora(adapted(), TRAINING.replace(lr=0.0))
    server, data, local = (
        method.init_server(jax.random.key(0)),
        client_data(tiny_federation(), 1, "train"),
        method.local,
    )
    first, second = (
        jax.jit(local)(jax.random.key(seed), server, rank, data).personal.params["backbone"]["fc1"] for seed in (1, 2)
    )
    for one in (first, second):
        assert one["lora_a"][:, :rank].all()
        assert not one["lora_a"][:, rank:].any()
        assert not one["lora_b"].any()
    assert distance(first["lora_a"], second["lora_a"]) > 0.1


# FlexLoRA


def best(matrix, rank):
    """Approximation of a matrix by one of this rank."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    return left[:, :rank] * values[:rank] @ right[:rank]


def test_flexlora_gives_each_client_the_best_part_of_the_mean_product():
    method, states = played(methods.flexlora, rounds=3)
    before, after = states[1], states[2]
    np.testing.assert_array_equal(after.clients, before.clients)
    assert len(set(np.asarray(before.clients))) > 1
    weights = np.asarray(tiny_federation().train_count) / np.asarray(tiny_federation().train_count).sum()
    trained = [double(local.personal["backbone"]) for local in trained_from(method, before, before.clients)]
    for name in ("fc1", "fc2"):
        products = [one[name]["lora_a"] @ one[name]["lora_b"] for one in trained]
        assert [np.linalg.matrix_rank(one, tol=1e-6) for one in products] == list(before.clients)
        mean = np.tensordot(weights, products, axes=1)
        for rank in (1, 2, 3):
            own = double(method.personalize(None, after.server, rank, None)["backbone"][name])
            np.testing.assert_allclose(own["lora_a"] @ own["lora_b"], best(mean, rank), rtol=1e-4, atol=1e-6)
            # The A are orthonormal, and B has the singular values.
            np.testing.assert_allclose(own["lora_a"].T @ own["lora_a"], np.diag(np.arange(3) < rank), atol=1e-5)


def test_flexlora_takes_layers_with_fewer_outputs_than_ranks():
    model = adapters.lora(models.mlp(SHAPE, 3, hidden=(2,)), SHAPE, rank=RANK, targets="fc")
    _, states = played(methods.flexlora, model=model)
    factors = double(states[-1].server["backbone"]["fc1"])
    assert factors["lora_a"].shape == (6, RANK)
    assert np.linalg.matrix_rank(factors["lora_a"] @ factors["lora_b"], tol=1e-6) == 2


# FedSA-LoRA


def test_fedsa_lora_is_fedper_on_another_split():
    _, states = played(methods.fedsa_lora, rounds=3)
    _, others = played(methods.fedper, rounds=3, model=split(adapted(), personal="lora_b|^head"))
    for layer in ("fc1", "fc2"):
        shared = states[-1].server["backbone"][layer]["lora_a"]
        np.testing.assert_array_equal(shared, others[-1].server["backbone"][f"backbone/{layer}/lora_a"])
    assert_same(states[-1].clients, jax.tree.leaves(others[-1].clients))


# HetLoRA


def test_hetlora_truncates_weighs_by_norms_and_keeps_ranks():
    infos = []
    method, states = played(methods.hetlora, rounds=3, lam=0.0, infos=infos)
    before, after = states[1], states[2]
    np.testing.assert_array_equal(infos[-1]["rank"], after.clients)
    ranks = np.asarray(before.clients)
    assert set(ranks) <= {1, 2, 3}
    assert len(set(ranks)) > 1
    sent = []
    for rank, local in zip(ranks, trained_from(method, before, ranks), strict=True):
        own = double(local.personal["backbone"])
        for name in ("fc1", "fc2"):
            # Ranks that a client does not have stay zero through its training.
            assert not own[name]["lora_a"][:, rank:].any()
            assert not own[name]["lora_b"][rank:].any()
        sent.append(own)
    for name in ("fc1", "fc2"):
        norms = np.array([np.linalg.norm(own[name]["lora_a"] @ own[name]["lora_b"]) for own in sent])
        for part in ("lora_a", "lora_b"):
            wanted = sum(norm * own[name][part] for norm, own in zip(norms / norms.sum(), sent, strict=True))
            got = after.server["backbone"][name][part]
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)
    # Nor does a client see the ranks of the server that it does not have.
    more = {name: part | {"lora_b": part["lora_b"].at[1:].add(1.0)} for name, part in before.server["backbone"].items()}
    local, data = jax.jit(method.local), client_data(tiny_federation(), 1, "train")
    one, same = (
        local(before.key, given, 1, data).personal for given in (before.server, before.server | {"backbone": more})
    )
    assert_same(one, same)


@pytest.mark.parametrize("name", ["flora", "flexlora", "hetlora"])
def test_noise_stays_in_the_ranks_that_a_client_has(name):
    """Private training, also by an optimizer that divides by the size of gradients."""
    recipe = TRAINING.replace(dp_clip=1.0, dp_noise=1.0, optimizer="adam", weight_decay=0.0)
    method, data = METHODS[name](adapted(), recipe), client_data(tiny_federation(), 1, "train")
    server = method.init_server(jax.random.key(0))
    sent = jax.jit(method.local)(jax.random.key(1), server, jnp.int32(2), data).message["backbone"]["fc1"]
    adapter = getattr(sent, "value", sent)
    for rows in (adapter["lora_a"].T, adapter["lora_b"]):
        np.testing.assert_array_equal(np.abs(rows).max(axis=1) > 0, [True, True, False])


def test_an_attacker_flips_the_update_of_every_adapter_of_hetlora():
    # Layers of one size: the adapters' shapes do not tell them apart.
    model = adapters.lora(models.mlp(SHAPE, 3, hidden=(6, 6, 6)), SHAPE, rank=RANK, targets="fc")
    method, states = played(methods.hetlora, rounds=1, model=model, min_rank=RANK)
    wrong = attacked(method, "signs", jnp.array(True), scale=1.0, num_classes=3)
    state, data = states[-1], client_data(tiny_federation(), 0, "train")
    # One rank less than the server has: nothing was received in the last one, and nothing is sent.
    given = jax.random.key(3), state.server, jnp.int32(RANK - 1), data
    honest, sent = (jax.jit(one.local)(*given).message for one in (method, wrong))
    values, found = (map_means(lambda part: part.value, one, rest=None) for one in (honest, sent))
    assert_same(found, jax.tree.map(lambda v, r: r - (v - r), values, keep_ranks(state.server, 0, RANK - 1)))


@pytest.mark.slow
def test_hetlora_gives_up_last_ranks_that_the_penalty_makes_small():
    _, free = played(methods.hetlora, rounds=3, lam=0.0, min_rank=1, gamma=0.5)
    _, small = played(methods.hetlora, rounds=3, lam=5.0, min_rank=1, gamma=0.5)
    assert np.asarray(small[-1].clients).sum() < np.asarray(free[-1].clients).sum()
    # Clients with fewer ranks than min_rank keep them.
    for min_rank in (3, 8):
        _, least = played(methods.hetlora, rounds=3, lam=5.0, min_rank=min_rank, gamma=0.5)
        assert (np.asarray(least[-1].clients) == 3).all()


def test_hetlora_s_penalty_is_the_product_of_the_norms_of_the_last_ranks():
    """One step of plain gradient descent on one batch of all examples, with and without the penalty."""
    model, federation = adapted(), tiny_federation()
    recipe = LocalTraining(lr=0.1, batch_size=64, epochs=1, momentum=0.0, weight_decay=0.0)
    server = methods.hetlora(model, recipe).init_server(jax.random.key(0))
    server["backbone"] = jax.tree.map(
        lambda leaf: leaf + 0.3 * jax.random.normal(jax.random.key(1), leaf.shape), server["backbone"]
    )
    data = client_data(federation, 1, "train")
    both = [methods.hetlora(model, recipe, lam=lam, gamma=0.5, min_rank=3) for lam in (0.0, 0.7)]
    stepped = [double(jax.jit(one.local)(jax.random.key(2), server, 3, data).message) for one in both]
    for name in ("fc1", "fc2"):
        own = double(server["backbone"][name])
        a, b = own["lora_a"][:, 1:3], own["lora_b"][1:3]
        step = 0.1 * 0.7 * a * np.linalg.norm(b) / np.linalg.norm(a)
        free, penalized = (one["backbone"][name].value["lora_a"] for one in stepped)
        np.testing.assert_allclose((free - penalized)[:, 1:3], step, rtol=1e-3, atol=1e-6)
        np.testing.assert_allclose((free - penalized)[:, :1], 0, atol=1e-6)


# FedDPA


@pytest.mark.slow
def test_feddpa_s_global_model_is_fedavg_s():
    _, own = played(methods.feddpa)
    _, base = played(methods.fedavg)
    assert_same(own[-1].server, base[-1].server)


def test_feddpa_mixes_the_adapters_for_each_input_by_its_cosines():
    model, federation = adapted(), tiny_federation()
    method, states = played(methods.feddpa, model=model, scale=0.8, references=7)
    # Of a client with five examples in twenty rows, the first two are references twice.
    state, data = states[-1], client_data(tiny_federation(), 3, "train")
    client = jax.tree.map(lambda leaf: leaf[3], state.clients)
    personal = method.personalize(jax.random.key(0), state.server, client, data)
    x = client_data(federation, 1, "test").x[:4]
    base, own, shared = model.frozen.read()["base"], double(client), double(state.server)

    def layers(inputs, alpha):
        states = np.asarray(inputs, np.float64).reshape(len(inputs), -1)
        for name in ("fc1", "fc2"):
            update = sum(
                share * one["backbone"][name]["lora_a"] @ one["backbone"][name]["lora_b"]
                for share, one in ((alpha, own), (1 - alpha, shared))
            )
            kernel = double(base[name]["kernel"]) + SCALE * update
            states = np.maximum(states @ kernel + double(base[name]["bias"]), 0)
        return states

    def cosine(left, right):
        return left @ right / np.linalg.norm(left) / np.linalg.norm(right)

    references, features = layers(data.x[np.arange(7) % 5], 1.0), layers(x, 1.0)
    predicted = jax.jit(method.predict)(personal, x)
    for row in range(4):
        alpha = 0.8 * np.mean([cosine(features[row], one) for one in references])
        head = {part: alpha * own["head"][part] + (1 - alpha) * shared["head"][part] for part in ("kernel", "bias")}
        wanted = layers(x[row : row + 1], alpha) @ head["kernel"] + head["bias"]
        np.testing.assert_allclose(predicted[row : row + 1], wanted, rtol=1e-4, atol=1e-5)


def test_a_client_of_feddpa_without_examples_deploys_the_global_model():
    method, states = played(methods.feddpa)
    state, data = states[-1], client_data(tiny_federation(), 1, "train")
    client = jax.tree.map(lambda leaf: leaf[1], state.clients)
    paused = data._replace(mask=jnp.zeros_like(data.mask))
    personal = method.personalize(jax.random.key(0), state.server, client, paused)
    want = jax.jit(adapted().apply)(state.server, data.x)
    np.testing.assert_allclose(jax.jit(method.predict)(personal, data.x), want, rtol=1e-5, atol=1e-6)


def test_feddpa_with_all_weight_on_its_own_adapter_trains_it_alone():
    """With share 1 the own parameters are those of a client that trains for itself, from the same start."""
    model, data = adapted(), client_data(tiny_federation(), 1, "train")
    alone, half = (methods.feddpa(model, TRAINING, share=share) for share in (1.0, 0.5))
    start = alone.init_server(jax.random.key(4))
    own, other = (jax.jit(one.local)(jax.random.key(3), start, start, data).client for one in (alone, half))
    key, loss = jax.random.fold_in(jax.random.key(3), PERSONAL_MODEL), supervised_loss(model)
    wanted = jax.jit(lambda start: TRAINING.fit(key, start, data, loss))(start)
    assert_same(own, wanted)
    assert distance(own, other) > 1e-6


# Factors A M and M^-1 B, which compute the same: what docs/pretrained.md says of methods that compare parameters


# A method with adapters in the states of clients runs by default; compiling all takes minutes.
@pytest.fixture(
    params=["feddpa", *(pytest.param(name, marks=pytest.mark.slow) for name in METHODS if name != "feddpa")],
    scope="module",
)
def subject(request):
    # At the usual rate, rounding grows beyond the tolerance in feddbe and pfedfda.
    return conformance.Subject(METHODS[request.param], model=adapted(), lr=0.02)


@pytest.mark.parametrize(
    "check",
    [
        "structure",
        "one_trace",
        "clients_outside",
        "resumption",
        pytest.param("chunks_and_padding", marks=pytest.mark.slow),
    ],
)
def test_conformance(subject, check):
    conformance.CHECKS[check](subject)
