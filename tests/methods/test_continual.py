"""FedLwF and FedReplay against float64 NumPy, and what a buffer keeps."""

import full_batches as full
import jax
import jax.numpy as jnp
import numpy as np
import reference
from rounds import local_results
from trees import assert_same, average

from pfl_jax import ClientData, Settings, data, models, run
from pfl_jax.methods import make_method
from pfl_jax.methods.fedreplay import joined, kept


def test_fedlwf():
    clients = full.training_examples()
    alpha, temperature = 0.3, 1.7
    w, previous = reference.to_numpy(full.start_of("fedlwf")), [None] * len(clients)
    for _ in range(3):
        trained = []
        for (x, y), before in zip(clients, previous, strict=True):

            def loss(v, now, x=x, y=y, before=before):
                own = reference.risk(v, x, y)
                if before is None:
                    return own
                p = np.exp(reference.log_softmax(reference.logits(before, x) / temperature))
                q = reference.log_softmax(reference.logits(v, x) / temperature)
                return alpha * own - (1 - alpha) * np.mean(np.sum(p * q, axis=1))

            trained.append(full.fit(w, loss))
        w, previous = reference.mean(full.BETA, trained), trained
    last = full.run("fedlwf", rounds=3, alpha=alpha, temperature=temperature)
    full.assert_model(last.state.server, w)
    full.assert_models(last.state.clients.params, previous)
    full.assert_received(last, [w] * 3)


def examples(numbers, size):
    """Some examples of whole numbers, padded to a size."""
    x = np.zeros((size, 2), np.float32)
    x[: len(numbers)] = np.stack([numbers, np.square(numbers)], axis=1)
    return ClientData(jnp.array(x), jnp.array(x[:, 0], jnp.int32), jnp.arange(size) < len(numbers))


def numbers(some):
    return np.asarray(some.y)[np.asarray(some.mask)].tolist()


def test_a_buffer_is_a_uniform_sample_of_all_that_was_seen():
    # Three phases of 40, 10 and 30 examples, each seen three times.
    phases, size, counts = (range(40), range(40, 50), range(50, 80)), 16, np.zeros(80)
    step = jax.jit(lambda now, buffer: kept(joined(now, buffer), size))
    for draw in range(60):
        buffer = examples([], size)
        shuffled = np.random.default_rng(draw).permutation(80) + 100 * draw
        for phase in phases:
            for _ in range(3):
                buffer = step(examples(shuffled[list(phase)], 40), buffer)
        found = numbers(buffer)
        assert len(set(found)) == size
        counts += np.isin(shuffled, found)
    # 12 of 60 expected, standard deviation 3.1; each phase has its share.
    shares = [counts[list(phase)].mean() for phase in phases]
    np.testing.assert_allclose(shares, 12, atol=1.7)
    # In any order and with any padding the same.
    one, other = (step(examples(order, 40), examples([], size)) for order in (range(30), range(29, -1, -1)))
    assert (
        sorted(numbers(one))
        == sorted(numbers(other))
        == sorted(numbers(step(examples(range(30), 33), examples([], size))))
    )


def test_kept_examples_are_joined_once():
    both = joined(examples([3, 5, 7], 4), examples([5, 9], 3))
    assert numbers(both) == [3, 5, 7, 9]
    assert both.mask.tolist() == [True] * 4 + [False] * 3


def test_equal_examples_are_kept_once():
    for first in range(4):
        repeated = examples([first, first, first, first + 1, first + 2], 6)
        found = kept(repeated, 4)
        assert sorted(numbers(found)) == [first, first + 1, first + 2]
        assert not np.asarray(found.x)[~np.asarray(found.mask)].any()


def test_fedreplay_trains_on_what_it_has_seen():
    """In the second phase with a buffer for all, training is that on the examples of both phases."""
    dataset = data.load("digits")
    parts = data.partition.iid(dataset, num_clients=3, train_size=20, test_size=10)
    federation = data.federate_phases(dataset, data.phases.classes(dataset, parts, 2), [1])

    model = models.mlp((8, 8, 1), 10, hidden=(6,))
    recipe = {"lr": 0.1, "batch_size": 64, "epochs": 2}
    *_, last = run(
        make_method("fedreplay", model, buffer_size=20, **recipe), federation, Settings(2), jax.random.key(0)
    )
    # FedAvg by hand: the first phase, then all examples of each client, weighted by those of the second phase.
    plain = make_method("fedavg", model, **recipe)
    first = next(run(plain, federation, Settings(2), jax.random.key(0)))
    whole = data.federate(dataset, parts)
    trained = [result.personal for result in local_results(plain, whole, first.state, 1)]
    wanted = average(trained, np.asarray(federation.parts[1].train_count, np.float64))
    assert_same(last.state.server, wanted, rtol=2e-4, atol=2e-5)
    counts = np.asarray(jnp.sum(last.state.clients.mask, axis=1))
    assert counts.tolist() == np.asarray(whole.train_count).tolist()
