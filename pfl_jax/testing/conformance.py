"""Checks that every method must pass, each a function that raises AssertionError.

Compiling is nearly all the work, so the checks of one `Subject` share its compiled engines wherever shapes and
settings allow.
"""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from pfl_jax.data.federated import client_data
from pfl_jax.engine import simulate
from pfl_jax.engine.simulate import Settings
from pfl_jax.messages import has_means, is_mean, is_summed, map_means, trained_from
from pfl_jax.primitives.tree import choose, gather
from pfl_jax.testing.comparison import LOOSE, TOLERANCE, assert_close, kinds, like, rows
from pfl_jax.testing.problems import permute_clients
from pfl_jax.testing.subject import Subject, play


def check_structure(subject: Subject) -> None:
    """A round of the subject keeps structure, shapes and types of the state, and everything is finite."""
    data, engine = subject.data(), subject.compiled()
    state = engine.init(data, jax.random.key(0))
    before, structure = kinds(state), jax.tree.structure(state._replace(key=()))
    keys = [name for name, (_, kind, _) in before.items() if jnp.issubdtype(kind, jax.dtypes.prng_key)]
    assert not keys, (
        f"keys are not numbers, which the host and files can hold: keep their key_data in {', '.join(keys)}"
    )

    def check_kinds(state):
        after = kinds(state)
        changed = [
            f"{name}: {before.get(name, 'absent')} before and {after.get(name, 'absent')} after a round"
            for name in before | after
            if before.get(name) != after.get(name)
        ]
        assert not changed, f"the state changes: {'; '.join(changed)}"
        assert jax.tree.structure(state._replace(key=())) == structure, "the state's structure changes in a round"

    # Rows of a part of the clients are written into the others' array, which casts them to its type.
    check_kinds(jax.eval_shape(lambda state: engine.round(data, state, 4)[0], state))
    for _ in range(2):
        state, outcome = engine.round(data, state, 3)
        check_kinds(state)
        chex.assert_tree_all_finite((state.server, state.clients, outcome.info))
        assert outcome.finite.all(), "a client's state or message is NaN or infinite"
        assert outcome.server_finite, "the server's state is NaN or infinite"
    assert int(state.round) == 2


def check_trained_from(subject: Subject) -> None:
    """`trained_from` of the subject is like its clients' messages, also if the last batch is small.

    Without it, a message is what training made of the download, and no change of it.
    """
    method, start, data = subject.build(), subject.start, subject.data()
    # 9 examples of 10 rows: 8 and 2 rows in mini-batches of 8.
    data = data._replace(train_index=data.train_index[:, :10])

    def values(data, server, clients):
        client = gather(clients, 0)
        message = method.local(jax.random.key(0), server, client, client_data(data, 0, "train")).message
        if not has_means(message):
            return (), ()
        sent = map_means(lambda part: part.value, message, rest=lambda leaf: leaf)
        return sent, trained_from(method, server, client, message)[0]

    if method.trained_from is not None:
        jax.eval_shape(values, data, start.server, start.clients)
        return
    sent, received = jax.jit(values)(data, start.server, start.clients)
    change = optax.tree.norm(jax.tree.map(jnp.subtract, sent, received))
    assert change <= optax.tree.norm(sent), (
        "the message looks like a change of the download, and wrappers would subtract the download from it once more: "
        "give a Method.trained_from that returns zeros like the message"
    )


def check_one_trace(subject: Subject) -> None:
    """A round of the subject is traced once, whatever the state and the seed."""
    engine, data = subject.compiled(), subject.data()
    state = play(engine, data, rounds=1)
    before = subject.traces
    assert before >= 1
    play(engine, data, rounds=2, state=state)
    play(engine, data, rounds=1, seed=1)
    assert subject.traces == before, "a later round was traced again"


def check_chunks_and_padding(subject: Subject) -> None:
    """Clients under one vmap, and more padding, do not change the subject's states."""
    engine, data, want = subject.compiled(chunk=3), subject.data(pad=11), subject.reference
    got = play(engine, data, state=subject.start)
    assert_close(got, want)
    losses = engine.evaluate(data, got)[subject.loss], subject.compiled().evaluate(subject.data(), want)[subject.loss]
    np.testing.assert_allclose(*losses, **TOLERANCE)


def check_devices(subject: Subject) -> None:
    """Several devices that share the clients change nothing for the subject; with one device nothing is checked."""
    if jax.device_count() < 2:
        return
    data, alone, shared = subject.data(), subject.compiled(), subject.compiled(shared=True)
    # A cohort of three cannot be split evenly over two devices or eight.
    got, want = play(shared, data), play(alone, data)
    assert_close(got, want)
    losses = shared.evaluate(data, got)[subject.loss], alone.evaluate(data, want)[subject.loss]
    np.testing.assert_allclose(*losses, **TOLERANCE)


def check_order_of_clients(subject: Subject) -> None:
    """Clients in another order have the same results with the subject, unless they take turns in their order."""
    if subject.build().hand_over is not None:
        return
    # Clients of one batch each, in arrays of the usual shapes: only the initial model is random.
    data = subject.data()
    data = data._replace(train_count=jnp.minimum(data.train_count, jnp.array([7, 8, 6, 5])))
    # This seed leaves out client 0 three times: the cohorts are the same clients in both orders.
    engine, order, seed = subject.compiled(), np.array([0, 2, 3, 1]), 4
    permuted = permute_clients(data, order)
    got, want = play(engine, permuted, seed), play(engine, data, seed)
    np.testing.assert_array_equal(np.isnan(want.trained[subject.loss]), [True, False, False, False])
    losses = engine.evaluate(permuted, got)[subject.loss], engine.evaluate(data, want)[subject.loss][order]
    np.testing.assert_allclose(*losses, **LOOSE)
    np.testing.assert_allclose(got.trained[subject.loss], want.trained[subject.loss][order], **LOOSE)
    chex.assert_trees_all_close(got.server, want.server, **LOOSE)
    chex.assert_trees_all_close(got.clients, rows(want.clients, order), **LOOSE)


def check_test_set(subject: Subject) -> None:
    """The clients' test sets do not change the states of the subject, bit for bit."""
    data, engine = subject.data(), subject.compiled()
    data = data._replace(x=data.x.astype(jnp.float32))
    tested = data.test_index.reshape(-1)
    others = {
        "huge inputs": data._replace(x=data.x.at[tested].set(3e38)),
        "inputs of NaN": data._replace(x=data.x.at[tested].set(jnp.nan)),
        "other labels": data._replace(y=data.y.at[tested].set(jnp.roll(data.y[tested], 1, axis=0))),
        "no examples": data._replace(test_count=jnp.zeros_like(data.test_count)),
    }
    want = play(engine, data)
    for what, other in others.items():
        got = play(engine, other)
        same = jax.tree.map(lambda a, b: bool((a == b).all()), (got.server, got.clients), (want.server, want.clients))
        assert all(jax.tree.leaves(same)), f"a test set of {what} changes the state"


def check_clients_outside(subject: Subject) -> None:
    """Clients outside the cohort of a round of the subject do not change."""
    data, engine = subject.data(), subject.compiled()
    state = engine.init(data, jax.random.key(3))
    for _ in range(2):
        before = jax.tree.map(np.asarray, (state.clients, state.trained))
        state, outcome = engine.round(data, state, 3)
        outside = np.setdiff1d(np.arange(4), np.asarray(outcome.cohort.clients))
        assert outside.size == 1
        after = jax.tree.map(np.asarray, (state.clients, state.trained))
        chex.assert_trees_all_equal(rows(after, outside), rows(before, outside))


def check_absent(subject: Subject) -> None:
    """Clients whose message does not arrive count as if they had not been drawn, whatever their new state.

    Padding and the order of the clients have no effect either. All of this holds for states and `Info` of the subject.
    """
    method = subject.build()

    def aggregate(key, server, clients, messages, cohort):
        (present,) = jnp.nonzero(cohort.present, size=3)
        arrived = jax.tree.map(
            lambda part: part if is_summed(part) else gather(part, present), messages, is_leaf=is_mean
        )
        alone = method.aggregate(key, server, gather(clients, present), arrived, gather(cohort, present))
        clients = choose(cohort.present, clients, jax.tree.map(jnp.ones_like, clients))
        after, rows_after, info = method.aggregate(key, server, clients, messages, cohort)
        return after, rows_after, {"all": (after, rows_after, info), "alone": alone}

    engine = simulate.build(method._replace(aggregate=aggregate), Settings(rounds=2, drop_rate=0.25)).jit()

    def played(data):
        # With this seed the last client is absent in the second round, so that the others keep their places, and
        # another one in the first.
        state, _ = engine.round(data, engine.init(data, jax.random.key(1)), 4)
        state, outcome = engine.round(data, state, 4)
        assert outcome.cohort.present.tolist() == [True, True, True, False]
        return (state.server, state.clients), jax.tree.map(np.asarray, outcome.info)

    # Clients of one batch each: only the initial model is random.
    data = subject.data()
    data = data._replace(train_count=jnp.minimum(data.train_count, jnp.array([7, 8, 6, 5])))
    (server, clients), found = played(data)
    alone, info = found["alone"], found["alone"][2]
    chex.assert_trees_all_close(like(alone, found["all"]), alone, **TOLERANCE)
    is_real = jnp.arange(data.train_index.shape[1]) < data.train_count[:, None]
    states, found = played(data._replace(train_index=jnp.where(is_real, data.train_index, data.x.shape[0] - 1)))
    chex.assert_trees_all_close(states, (server, clients), **TOLERANCE)
    chex.assert_trees_all_close(like(info, found["all"][2]), info, **TOLERANCE)
    if method.hand_over is not None:
        # Clients take turns in their order.
        return
    order = np.array([1, 2, 0, 3])
    states, found = played(permute_clients(data, order))
    chex.assert_trees_all_close(states, (server, rows(clients, order)), **LOOSE)
    chex.assert_trees_all_close(like(info, found["all"][2], np.argsort(order)[:3]), info, **LOOSE)


def check_options(subject: Subject) -> None:
    """Absence, padding and order have no effect with other values of the subject's choices and switches either."""
    for name, other in subject.others().items():
        try:
            check_absent(other)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def check_resumption(subject: Subject) -> None:
    """A run of the subject that goes on from a saved state equals the uninterrupted one."""
    engine, data = subject.compiled(), subject.data()
    whole, half = play(engine, data, rounds=4), play(engine, data, rounds=2)
    # A saved and restored state consists of its arrays and its key's data.
    stored = jax.tree.map(np.asarray, half._replace(key=jax.random.key_data(half.key)))
    restored = jax.tree.map(jnp.asarray, stored)
    restored = restored._replace(key=jax.random.wrap_key_data(restored.key))
    continued = play(engine, data, rounds=2, state=restored)
    chex.assert_trees_all_equal(continued._replace(key=()), whole._replace(key=()))


def check_seeds(subject: Subject) -> None:
    """The same seed gives the same result of the subject, and another one does not."""
    engine, data, first = subject.compiled(), subject.data(), subject.reference
    again, other = play(engine, data), play(engine, data, seed=1)
    chex.assert_trees_all_equal(first._replace(key=()), again._replace(key=()))
    differences = jax.tree.map(
        lambda a, b: float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max(initial=0)),
        (first.server, first.clients),
        (other.server, other.clients),
    )
    assert max(jax.tree.leaves(differences), default=0) > 1e-3, "another seed gives the same state"


def check_vmap(subject: Subject) -> None:
    """Whole runs of the subject under vmap over seeds and learning rates, with every real number an input."""
    data, settings = subject.data(), Settings(rounds=1)

    def whole_run(seed, rates, others):
        engine = simulate.build(subject.build(**others, **rates), settings)
        state = engine.init(data, jax.random.key(seed))
        state = jax.lax.fori_loop(0, 2, lambda _, state: engine.round(data, state, 3)[0], state)
        return (state.server, state.clients), state.trained[subject.loss]

    every = subject.hyper_parameters
    # An optimizer can have its own learning rate.
    usual = every.pop("lr")
    rates = {} if usual is None else {"lr": jnp.array([usual, usual, usual / 5])}
    # As in sweeps.
    others = {name: value for name, value in every.items() if isinstance(value, float)}
    over = jax.jit(jax.vmap(whole_run, in_axes=(0, 0, None)))
    states, losses = over(jnp.array([0, 1, 0]), rates, others)
    for index in range(2):
        alone = play(subject.compiled(), data, seed=index, rounds=2)
        chex.assert_trees_all_close(rows(states, index), (alone.server, alone.clients), **TOLERANCE)
        np.testing.assert_allclose(losses[index], alone.trained[subject.loss], **TOLERANCE)
    chex.assert_tree_all_finite(states)


def check_learning(subject: Subject, accuracy: float = 0.85) -> None:
    """Predictions have the shape of the model's outputs, in float32, and are good after twenty rounds.

    Args:
      subject: the method.
      accuracy: value that the mean over clients must exceed if the outputs are classes, under both protocols. Always
        naming a client's largest class gives about 0.7. For other tasks a loss must fall to 0.7 of its start.
    """
    method, data, engine = subject.build(), subject.data(), subject.compiled()
    last, x = play(engine, data, rounds=20, state=subject.start), client_data(data, 1, "test").x

    def predict(server, client):
        personal = method.personalize(jax.random.key(0), server, client, client_data(data, 1, "train"))
        return method.predict(personal, x)

    model = subject.model
    wanted = jax.eval_shape(lambda key: model.apply(model.init(key), x), jax.random.key(0))
    found = jax.eval_shape(predict, last.server, rows(last.clients, 1))
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), f"predict gives {found.dtype}{found.shape}"
    scores = engine.evaluate(data, last)
    assert np.isfinite(scores[subject.loss]).all(), "the loss of a client's predictions is not finite"
    if subject.task.kind != "classes":
        before, after = (float(of[subject.loss].mean()) for of in (engine.evaluate(data, subject.start), scores))
        assert after < 0.7 * before, f"after 20 rounds the mean {subject.loss} is {after:.3f}, and it was {before:.3f}"
        return
    found = {"received": float(scores["accuracy"].mean()), "trained": float(last.trained["accuracy"].mean())}
    for protocol, mean in found.items():
        assert mean > accuracy, f"after 20 rounds the mean accuracy ({protocol}) is {mean:.3f}, not above {accuracy}"


CHECKS: dict[str, Callable[[Subject], None]] = {
    "structure": check_structure,
    "trained_from": check_trained_from,
    "one_trace": check_one_trace,
    "chunks_and_padding": check_chunks_and_padding,
    "devices": check_devices,
    "order_of_clients": check_order_of_clients,
    "test_set": check_test_set,
    "clients_outside": check_clients_outside,
    "absent": check_absent,
    "options": check_options,
    "resumption": check_resumption,
    "seeds": check_seeds,
    "vmap": check_vmap,
    "learning": check_learning,
}
"""All checks by name."""
