"""`pfl_jax.testing.check_method` passes a sound method and names the rule that a broken one breaks."""

import itertools
import re
from typing import Literal

import jax
import jax.numpy as jnp
import pytest

from pfl_jax import InvalidInput, LocalResult, methods, tasks
from pfl_jax.primitives import LocalTraining, mean_by_size, merge, supervised_loss
from pfl_jax.testing import CHECKS, Subject, check_method


def only(*names):
    return [name for name in CHECKS if name not in names]


def altered(server=None, message=None, refuses=None, client=None, aggregate=None):
    """A factory of FedAvg with a mistake: other states, messages or numbers kept, or an `if` on a traced share."""

    def factory(model, training=LocalTraining(), *, share: float = 0.5):
        base = methods.fedavg(model, training)

        def local(key, state, own, data):
            if refuses and refuses(share):
                raise ValueError
            result = base.local(key, state, (), data)
            result = result if message is None else result._replace(message=message(result.message, data))
            return result if client is None else result._replace(client=own + client)

        def combine(key, state, clients, messages, cohort):
            if aggregate:
                return aggregate(messages), clients, {}
            state, clients, info = base.aggregate(key, state, clients, messages, cohort)
            return state if server is None else server(state, cohort), clients, info

        method = base._replace(local=local, aggregate=combine)
        return method if client is None else method._replace(init_client=lambda *_: jnp.zeros((), jnp.int32))

    return factory


def plus(number, tree):
    return jax.tree.map(lambda leaf: leaf + number, tree)


IN_BFLOAT16 = altered(server=lambda state, _: jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state))
READS_PADDING = altered(
    message=lambda message, data: message._replace(value=plus(1e-3 * data.mask.shape[0], message.value))
)
COUNTS_THE_ABSENT = altered(
    message=lambda message, _: message.value,
    aggregate=lambda messages: jax.tree.map(lambda leaf: leaf.mean(axis=0), messages),
)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("check", "factory", "message"),
    [
        (
            "order_of_clients",
            altered(server=lambda state, cohort: plus(0.01 * cohort.counts[0], state)),
            "Clients in another order have the same results",
        ),
        ("structure", IN_BFLOAT16, r"the state changes: .*float32.* before and .*bfloat16.* after"),
        # A row of the old array would be cut to its type.
        ("structure", altered(client=0.5), r"clients: .*int32.*float32.* after"),
        ("one_trace", IN_BFLOAT16, "a later round was traced again"),
        pytest.param("absent", COUNTS_THE_ABSENT, "count as if they had not been drawn", marks=SLOW),
        ("trained_from", altered(message=lambda sent, _: (sent, sent.weight)), "must give a tree like the message"),
        ("trained_from", altered(message=lambda sent, _: jax.tree.map(lambda x: 0.01 * x, sent)), "like a change of"),
        ("seeds", altered(server=lambda state, _: jax.tree.map(jnp.zeros_like, state)), "another seed gives"),
        pytest.param("vmap", altered(refuses=lambda share: share > 1), "TracerBoolConversionError", marks=SLOW),
        pytest.param("chunks_and_padding", READS_PADDING, "Clients under one vmap, and more padding", marks=SLOW),
    ],
)
def test_a_broken_method_fails_with_the_rule_it_breaks(check, factory, message):
    with pytest.raises(AssertionError, match=message) as failure:
        check_method(factory, skip=only(check))
    assert str(failure.value).startswith(f"{check}: ")


class Altered(Subject):
    """FedPer in an engine that makes a mistake: `alter` takes each round's state and outcome to what it returns."""

    def __init__(self, alter):
        super().__init__(methods.fedper)
        self.alter = alter

    def compiled(self, chunk=1, *, shared=False):
        engine = super().compiled(chunk, shared=shared)
        return engine._replace(round=lambda *arguments: self.alter(*engine.round(*arguments)))


def remembers():
    """Something outside the state differs from round to round."""
    number = itertools.count()
    return lambda state, outcome: (state._replace(server=plus(next(number), state.server)), outcome)


def changing(**fields):
    """Takes a state to one with other fields."""
    return lambda state, outcome: (state._replace(**{name: of(state) for name, of in fields.items()}), outcome)


TRAINS_ON_SCORES = changing(server=lambda state: plus(jnp.nan_to_num(state.trained["loss"]).sum(), state.server))


def with_choice(model, training=LocalTraining(), *, mean: Literal["weighted", "of_rows"] = "weighted"):
    """FedAvg whose other mean counts absent clients."""
    return (COUNTS_THE_ABSENT if mean == "of_rows" else methods.fedavg)(model, training)


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
        pytest.param("test_set", TRAINS_ON_SCORES, "a test set of huge inputs changes the state", marks=SLOW),
        ("clients_outside", changing(clients=lambda state: plus(1, state.clients)), "not exactly equal"),
        pytest.param("devices", remembers(), "not approximately equal", marks=SLOW),
        ("resumption", remembers(), "not exactly equal"),
        ("learning", changing(trained=lambda state: plus(-1, state.trained)), r"accuracy \(trained\)"),
    ],
)
def test_a_check_notices_a_wrong_round(check, alter, message):
    with pytest.raises(AssertionError, match=message):
        CHECKS[check](Altered(alter))


def test_the_accuracy_is_the_callers():
    with pytest.raises(AssertionError, match=r"not above 0\.999"):
        check_method(methods.fedavg, accuracy=0.999, skip=only("learning"), lr=0.01, epochs=1)


def test_the_clients_learn_the_callers_task():
    seen = []

    def halved(outputs, y, mask):
        seen.append(y.shape[1:])
        return 0.5 * tasks.REGRESSION.loss(outputs, y, mask)

    task = tasks.REGRESSION._replace(loss=halved)
    with pytest.raises(AssertionError, match=r"learning: .*after 20 rounds the mean mse is .*, and it was "):
        check_method(methods.fedper, task=task, skip=only("structure", "learning"), lr=1e-5)
    assert set(seen) == {(3,)}
    with pytest.raises(InvalidInput, match=r"the tiny problem has labels for classification, .* for the task quantile"):
        check_method(methods.fedper, task=task._replace(name="quantile"))


def test_an_unknown_check_is_refused():
    with pytest.raises(InvalidInput, match="there is no check 'stucture': choose structure"):
        check_method(methods.fedavg, skip=["stucture"])


def test_an_error_in_a_method_says_where_it_was_and_which_leaves_were_expected():
    def of_the_whole_server(model, training=LocalTraining()):
        def local(key, server, client, data):
            params = training.fit(key, merge(server, client), data, supervised_loss(model))
            return LocalResult(params["head"], mean_by_size(params["backbone"], data), params)

        return methods.fedper(model, training)._replace(local=local)

    with pytest.raises(AssertionError) as error:
        check_method(of_the_whole_server)
    assert str(error.value).startswith("structure: ")
    assert re.search(r"test_check_method\.py, line \d+, in local: the model's backbone has", str(error.value))
    assert "the leaves bias and kernel, and got backbone/bias, backbone/kernel, head/bias, head" in str(error.value)
    assert str(error.value).endswith("(state of the server: model; of a client: head)")
