"""`pfl_jax.testing.check_method` passes a sound method and names the rule that a broken one breaks."""

import itertools
from typing import Literal

import jax
import jax.numpy as jnp
import pytest

from pfl_jax import InvalidInput, methods, tasks
from pfl_jax.primitives import LocalTraining
from pfl_jax.testing import CHECKS, Subject, check_method


def only(*names):
    return [name for name in CHECKS if name not in names]


def broken(**parts):
    """A factory of FedAvg with some functions in the place of its own: name -> (base, arguments...) -> result."""

    def factory(model, training=LocalTraining(), *, share: float = 0.5):
        base = methods.fedavg(model, training)
        changed = {name: lambda *arguments, _part=part: _part(base, share, *arguments) for name, part in parts.items()}
        return base._replace(**changed)

    return factory


def leaks_order(base, share, key, server, clients, messages, cohort):
    """The server adds something that depends on the size of the round's first client."""
    server, clients, info = base.aggregate(key, server, clients, messages, cohort)
    return jax.tree.map(lambda leaf: leaf + 0.01 * cohort.counts[0], server), clients, info


def counts_in_floats(base, share, key, server, clients, messages, cohort):
    """The server's state has another type after a round."""
    server, clients, info = base.aggregate(key, server, clients, messages, cohort)
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), server), clients, info


def starts_at_zero(base, share, key, server, data):
    return jnp.zeros((), jnp.int32)


def adds_a_half(base, share, key, server, client, data):
    """The client's state has another type after a round, to which its row of the old array would be cut."""
    return base.local(key, server, (), data)._replace(client=client + 0.5)


def branches(base, share, key, server, client, data):
    """A Python `if` on a hyper-parameter that sweeps trace."""
    if share > 1:
        raise ValueError
    return base.local(key, server, client, data)


def reads_padding(base, share, key, server, client, data):
    """Padding counts as examples."""
    count = jnp.asarray(data.mask.shape[0], jnp.float32)
    result = base.local(key, server, client, data)
    shifted = jax.tree.map(lambda leaf: leaf + 1e-3 * count, result.message.value)
    return result._replace(message=result.message._replace(value=shifted))


def starts_alike(base, share, key, server, clients, messages, cohort):
    """Whatever happens, the same state."""
    return jax.tree.map(jnp.zeros_like, server), clients, {}


def counts_the_absent(base, share, key, server, clients, messages, cohort):
    """The mean is over all rows, also those that stand for no message."""
    return jax.tree.map(lambda leaf: leaf.mean(axis=0), messages), clients, {}


def sends_the_model(base, share, key, server, client, data):
    result = base.local(key, server, client, data)
    return result._replace(message=result.message.value)


def sends_more(base, share, key, server, client, data):
    result = base.local(key, server, client, data)
    return result._replace(message=(result.message, result.message.weight))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("check", "parts", "message"),
    [
        ("order_of_clients", {"aggregate": leaks_order}, "Clients in another order have the same results"),
        ("structure", {"aggregate": counts_in_floats}, r"the state changes: .*float32.* before and .*bfloat16.* after"),
        ("structure", {"init_client": starts_at_zero, "local": adds_a_half}, r"clients: .*int32.*float32.* after"),
        ("one_trace", {"aggregate": counts_in_floats}, "a later round was traced again"),
        pytest.param(
            "absent",
            {"aggregate": counts_the_absent, "local": sends_the_model},
            "count as if they had not been drawn",
            marks=SLOW,
        ),
        ("trained_from", {"local": sends_more}, "must give a tree like the message"),
        ("seeds", {"aggregate": starts_alike}, "another seed gives the same state"),
        pytest.param("vmap", {"local": branches}, "TracerBoolConversionError", marks=SLOW),
        pytest.param(
            "chunks_and_padding", {"local": reads_padding}, "Neither clients under one vmap nor more", marks=SLOW
        ),
    ],
)
def test_a_broken_method_fails_with_the_rule_it_breaks(check, parts, message):
    with pytest.raises(AssertionError, match=message) as failure:
        check_method(broken(**parts), skip=only(check))
    assert str(failure.value).startswith(f"{check}: ")


class Altered(Subject):
    """FedPer in an engine that makes a mistake: `alter` takes each round's state and outcome to what it returns."""

    def __init__(self, alter):
        super().__init__(methods.fedper)
        self.alter = alter

    def compiled(self, chunk=1, *, shared=False):
        engine = super().compiled(chunk, shared=shared)
        return engine._replace(round=lambda *arguments: self.alter(*engine.round(*arguments)))


def plus(number, tree):
    return jax.tree.map(lambda leaf: leaf + number, tree)


def remembers():
    """Something outside the state differs from round to round."""
    number = itertools.count()
    return lambda state, outcome: (state._replace(server=plus(next(number), state.server)), outcome)


def changes_everyone(state, outcome):
    return state._replace(clients=plus(1, state.clients)), outcome


def loses_accuracy(state, outcome):
    return state._replace(trained=plus(-1, state.trained)), outcome


def trains_on_scores(state, outcome):
    return state._replace(server=plus(jnp.nan_to_num(state.trained["loss"]).sum(), state.server)), outcome


def with_choice(model, training=LocalTraining(), *, mean: Literal["weighted", "of_rows"] = "weighted"):
    """FedAvg whose other mean counts absent clients."""
    base = methods.fedavg(model, training)
    parts = {"local": sends_the_model, "aggregate": counts_the_absent} if mean == "of_rows" else {}
    return broken(**parts)(model, training) if parts else base


def with_info(model, training=LocalTraining()):
    """FedAvg that reports each client's weight as if all had arrived."""
    base = methods.fedavg(model, training)

    def aggregate(key, server, clients, messages, cohort):
        server, clients, _ = base.aggregate(key, server, clients, messages, cohort)
        return server, clients, {"weights": jnp.ones(cohort.present.shape) / cohort.present.shape[0]}

    return base._replace(aggregate=aggregate)


def test_the_other_values_of_a_choice_are_checked_too():
    check_method(with_choice, skip=only("absent"))
    with pytest.raises(AssertionError, match=r"^options: .*But: mean=of_rows: "):
        check_method(with_choice, skip=only("options"))
    check_method(with_choice, mean="of_rows", skip=only("options"))


def test_what_a_round_reports_is_checked_too():
    with pytest.raises(AssertionError, match=r"^absent: .*weights"):
        check_method(with_info, skip=only("absent"))


@pytest.mark.parametrize(
    ("check", "alter", "message"),
    [
        pytest.param("test_set", trains_on_scores, "a test set of huge inputs changes the state", marks=SLOW),
        ("clients_outside", changes_everyone, "not exactly equal"),
        pytest.param("devices", remembers(), "not approximately equal", marks=SLOW),
        ("resumption", remembers(), "not exactly equal"),
        ("learning", loses_accuracy, r"accuracy \(trained\)"),
    ],
)
def test_a_check_notices_a_wrong_round(check, alter, message):
    with pytest.raises(AssertionError, match=message):
        CHECKS[check](Altered(alter))


def test_the_accuracy_is_the_callers():
    with pytest.raises(AssertionError, match=r"not above 0\.999"):
        check_method(broken(), accuracy=0.999, skip=only("learning"), lr=0.01, epochs=1)


def test_the_clients_learn_the_callers_task():
    seen = []

    def halved(outputs, y, mask):
        seen.append(y.shape[1:])
        return 0.5 * tasks.REGRESSION.loss(outputs, y, mask)

    task = tasks.REGRESSION._replace(loss=halved)
    check_method(methods.fedper, task=task, skip=only("structure", "learning"))
    assert set(seen) == {(3,)}
    with pytest.raises(AssertionError, match=r"learning: .*after 20 rounds the mean mse is .*, and it was "):
        check_method(methods.fedper, task=task, skip=only("learning"), lr=1e-5)
    with pytest.raises(InvalidInput, match=r"the tiny problem has labels for classification, .* for the task quantile"):
        check_method(methods.fedper, task=task._replace(name="quantile"))


def test_an_unknown_check_is_refused():
    with pytest.raises(InvalidInput, match="there is no check 'stucture': choose structure"):
        check_method(methods.fedavg, skip=["stucture"])
