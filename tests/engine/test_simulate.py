"""Cohorts, stragglers, devices and programs of the engine, without regard to any method."""

import argparse
import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import HYPER_PARAMETERS, diverging, tiny_federation, tiny_method, tiny_model

from pfl_jax import InvalidInput, Settings, models, simulate, sweep
from pfl_jax.data import federate
from pfl_jax.engine import build, remembered
from pfl_jax.engine.store import OnHost
from pfl_jax.methods import make_method

COUNTS = jnp.array([5, 9, 7, 9, 1, 3, 8, 2, 6, 4], jnp.int32)


def cohorts(settings, size, rounds, seed=0, counts=COUNTS):
    key = jax.random.key(seed)
    draw = jax.jit(lambda index: simulate.sample_cohort(key, index, counts, size, settings))
    return [draw(index) for index in range(rounds)]


def test_cohorts_do_not_depend_on_the_precision():
    settings = Settings(rounds=1, drop_rate=0.5, straggler_fraction=0.4, straggler_rate=0.3)
    usual = cohorts(settings, 4, 20)
    with jax.enable_x64(True):
        double = cohorts(settings, 4, 20)
    for one, other in zip(usual, double, strict=True):
        np.testing.assert_array_equal(one.clients, other.clients)
        np.testing.assert_array_equal(one.present, other.present)


@pytest.mark.parametrize("name", ["fedem", "fedfomo", "floco"])
def test_methods_with_states_beside_models_run_in_64_bit_mode(name):
    with jax.enable_x64(True):
        method = make_method(name, tiny_model(), lr=0.1, batch_size=8, epochs=1)
        engine = simulate.build(method, Settings(rounds=1))
        state = jax.eval_shape(engine.init, tiny_federation(), jax.random.key(0))
        after, _ = jax.eval_shape(lambda data, state: engine.round(data, state, 3), tiny_federation(), state)
        assert [leaf.dtype for leaf in jax.tree.leaves(after)] == [leaf.dtype for leaf in jax.tree.leaves(state)]


def test_stragglers_are_fixed_and_drawn_less_often():
    settings = Settings(rounds=1, straggler_fraction=0.5, straggler_rate=0.1)
    drawn = np.concatenate([np.asarray(c.clients) for c in cohorts(settings, 2, 2000)])
    often = np.bincount(drawn, minlength=10)
    slow = np.asarray(simulate.stragglers(jax.random.key(0), 10, 0.5))
    assert slow.sum() == 5
    # The nearest number of clients.
    assert [simulate.stragglers(jax.random.key(0), 10, share).sum() for share in (0.14, 0.16, 0.99)] == [1, 2, 10]
    assert often[slow].max() < 0.3 * often[~slow].min()
    # The first of two draws falls on one given straggler with probability 0.1 / 5.5.
    first = [int(c.clients[0]) for c in cohorts(settings, 1, 4000)]
    np.testing.assert_allclose(np.mean(np.isin(first, np.flatnonzero(slow))), 0.5 / 5.5, atol=0.02)


def test_who_drops_out_does_not_depend_on_how_clients_are_numbered():
    order, settings = np.random.default_rng(0).permutation(5), Settings(rounds=1, drop_rate=0.4)
    counts = jnp.array([5, 9, 7, 1, 3], jnp.int32)
    drawn = [cohorts(settings, 5, 5, counts=numbered) for numbered in (counts, counts[order])]
    one, other = (np.stack([cohort.present for cohort in each]) for each in drawn)
    np.testing.assert_array_equal(one[:, order], other)
    # Others in every round.
    assert len({tuple(row) for row in one.tolist()}) > 1


@pytest.mark.parametrize(
    ("participation", "last", "clients", "want"),
    [
        (1.0, False, 20, 20),
        (0.3, False, 100, 30),
        (0.03, False, 1000, 30),
        (0.001, False, 20, 1),
        (0.3, True, 100, 100),
        # 28.999999999999996 and 4.95.
        (0.29, False, 100, 29),
        (0.55, False, 9, 5),
    ],
)
def test_cohort_sizes(participation, last, clients, want):
    settings = Settings(rounds=5, participation=participation, full_last_round=last)
    assert settings.cohort_size(clients, 4) == want
    # The round before is never a full one.
    assert settings.cohort_size(clients, 3) == (30 if last else want)


def test_evaluation_rounds_and_results():
    method = tiny_method("fedper")
    settings = Settings(rounds=5, eval_every=2, participation=0.5)
    results = list(simulate.run(method, tiny_federation(), settings, jax.random.key(0)))
    assert [result.round for result in results] == [1, 2, 3, 4, 5]
    assert [result.received is not None for result in results] == [False, True, False, True, True]
    trained_so_far = np.zeros(4, bool)
    for result in results:
        trained_so_far[result.cohort] = True
        np.testing.assert_array_equal(~np.isnan(result.trained["accuracy"]), trained_so_far)
        assert result.examples == np.array([9, 20, 14, 5])[result.cohort].sum()


@pytest.mark.parametrize("name", ["fedper", pytest.param("fedpac", marks=pytest.mark.slow)])
def test_nothing_is_compiled_after_the_first_round(name):
    """Also where clients drop out, others in every round, and where one diverges; on both devices."""
    mesh = simulate.client_mesh()

    def every_other(index):
        return diverging(tiny_method(name), 5, when=index % 2 == 1)

    settings = Settings(rounds=6, drop_rate=0.4)
    with compilations() as compiled:
        rounds = simulate.run(
            every_other, tiny_federation(), settings, jax.random.key(0), mesh=mesh, on_nan="skip-client"
        )
        results = [(len(compiled), tuple(result.cohort[result.arrived]), len(result.diverged)) for result in rounds]
    counts, arrived, diverged = zip(*results, strict=True)
    assert counts[0] > 0
    assert set(counts) == {counts[0]}
    assert len(set(arrived)) > 1
    assert diverged == (0, 1) * 3


@pytest.mark.parametrize(("devices", "state_on"), [(2, "device"), pytest.param(1, "host", marks=pytest.mark.slow)])
def test_rows_of_info_are_those_of_the_cohort(devices, state_on):
    """The cohort is ascending, although its largest clients train first, two at a time."""
    base = tiny_method("fedper")
    sizes = np.array([9, 20, 14, 5])

    def local(key, server, client, data):
        result = base.local(key, server, client, data)
        return result._replace(message=(result.message, jnp.sum(data.mask), result.client))

    def aggregate(key, server, clients, messages, cohort):
        mean, counts, heads = messages
        server, clients, _ = base.aggregate(key, server, clients, mean, cohort)
        return server, clients, {"counts": counts, "clients": cohort.clients, "head": heads["bias"]}

    method = base._replace(local=local, aggregate=aggregate)
    mesh = simulate.client_mesh() if devices == 2 else None
    settings = Settings(rounds=4, participation=0.75, full_last_round=True, chunk=2)
    data = tiny_federation(sizes.tolist())
    results = list(simulate.run(method, data, settings, jax.random.key(2), mesh=mesh, state_on=state_on))
    for result in results:
        assert (np.diff(result.cohort) > 0).all()
        np.testing.assert_array_equal(result.info["clients"], result.cohort)
        np.testing.assert_array_equal(result.info["counts"], sizes[result.cohort])
        np.testing.assert_array_equal(result.info["head"], result.state.clients["bias"][result.cohort])
    # The last round is the full one.
    assert [len(result.cohort) for result in results] == [3, 3, 3, 4]


@pytest.mark.parametrize("state_on", ["device", pytest.param("host", marks=pytest.mark.slow)])
def test_all_results_of_a_run_stay_usable_unless_states_are_donated(state_on):
    method, data = tiny_method("fedper"), tiny_federation()
    settings = Settings(rounds=3, participation=0.5)

    def play(**options):
        return simulate.run(method, data, settings, jax.random.key(7), state_on=state_on, **options)

    def read(result):
        return jax.tree.map(np.array, result.state._replace(key=jax.random.key_data(result.state.key)))

    one_by_one = [read(result) for result in play(donate=True)]
    kept = list(play())
    for want, result in zip(one_by_one, kept, strict=True):
        jax.tree.map(np.testing.assert_array_equal, want, read(result))
    # The state to start from stays as it was either way, also where a round would write into its arrays.
    on_host = kept[0].state._replace(clients=jax.tree.map(np.array, kept[0].state.clients))
    for state, options in (
        (kept[0].state, {"state_on": state_on}),
        (kept[0].state, {"state_on": state_on, "donate": True}),
        (on_host, {"state_on": "host", "donate": True}),
    ):
        _, last = simulate.run(method, data, settings, jax.random.key(0), state=state, **options)
        np.testing.assert_allclose(last.trained["loss"], kept[-1].trained["loss"], rtol=1e-6)
        jax.tree.map(np.testing.assert_array_equal, one_by_one[0], read(kept[0]._replace(state=state)))
    first, *_ = play(donate=True)
    if state_on == "device":
        assert jax.tree.leaves(first.state.server)[0].is_deleted()


DATA = tiny_federation()


@contextlib.contextmanager
def compilations():
    """Names of the functions that are traced or compiled inside."""
    names = []

    def listener(event, duration, **about):
        if "compile" in event:
            names.append(about.get("fun_name", event))

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)


@pytest.mark.parametrize("state_on", ["device", pytest.param("host", marks=pytest.mark.slow)])
@pytest.mark.parametrize("of", ["an engine", "a method"])
def test_another_run_compiles_nothing(of, state_on):
    method, common = tiny_method("fedper"), {"participation": 0.5, "chunk": 2}
    options = {"state_on": state_on}
    if of == "an engine":
        store = OnHost() if state_on == "host" else None
        options = {"engine": simulate.build(method, Settings(rounds=1, **common), store=store).jit()}

    def play(seed, method=method, state=None, **settings):
        settings = Settings(**common, **settings)
        return list(simulate.run(method, DATA, settings, jax.random.key(seed), state=state, **options))[-1]

    first = play(0, rounds=2)
    with compilations() as later:
        again, other = play(0, rounds=2), play(1, rounds=3, eval_every=2)
    assert not later
    np.testing.assert_array_equal(again.trained["loss"], first.trained["loss"])
    assert not np.array_equal(other.trained["loss"], first.trained["loss"], equal_nan=True)
    with compilations() as later:
        play(2, state=first.state, rounds=3)
    # A state to continue from is copied, and its shapes are compared with a new one's, which is traced for it.
    assert set(later) <= {"init", "copy", "jit(copy)"}
    # Settings of the rounds are a part of the program, and so is the method: an equal one is another one.
    for changes in ({"drop_rate": 0.5}, {"method": method._replace()}) if of == "a method" else ():
        with compilations() as later:
            play(0, rounds=2, **changes)
        assert later


def test_another_sweep_of_a_function_compiles_nothing():
    def make(lr):
        return make_method("fedavg", tiny_model(), **HYPER_PARAMETERS | {"lr": lr})

    def play(seed, *rates):
        keys = jax.vmap(jax.random.key)(jnp.full(2, seed))
        *_, last = sweep.run(make, DATA, Settings(rounds=2, chunk=2), keys, {"lr": jnp.array(rates)})
        return last.trained["loss"]

    first = play(0, 0.1, 0.2)
    with compilations() as later:
        other = play(1, 0.3, 0.4)
    # The shapes of a state are asked for, and those that the factory makes.
    assert set(later) <= {"<lambda>", "init"}
    assert not np.allclose(first, other)


@pytest.mark.parametrize("state_on", ["device", "host", pytest.param("disk", marks=pytest.mark.slow)])
def test_other_values_of_hyper_parameters_compile_nothing(state_on):
    def make(**values):
        return make_method("ditto", tiny_model(), **HYPER_PARAMETERS | values)

    def play(method, *values):
        settings = Settings(rounds=2, chunk=2)
        *_, last = simulate.run(method, DATA, settings, jax.random.key(0), *values, state_on=state_on)
        return last.trained["loss"]

    play(make, {"lr": 0.1, "lam": 0.5, "epochs": 1})
    with compilations() as later:
        changed = play(make, {"lr": 0.03, "lam": 2.0, "epochs": 1})
    # `make_method` asks for shapes of its factory.
    assert set(later) <= {"<lambda>"}
    np.testing.assert_allclose(changed, play(make(lr=0.03, lam=2.0, epochs=1)), rtol=1e-4)
    # A whole number is a part of the program.
    assert not np.allclose(changed, play(make, {"lr": 0.03, "lam": 2.0, "epochs": 2}), rtol=1e-3)
    with pytest.raises(InvalidInput, match="lam must not be negative, not -1"):
        play(make, {"lam": -1.0})
    with pytest.raises(InvalidInput, match="one of lr, batch_size changes shapes"):
        play(make, {"lr": 0.1, "batch_size": np.array(3)})


def test_engines_of_a_few_methods_are_kept():
    class Things(list):
        pass

    kept = []
    make = remembered.remembered(lambda thing: kept.append(thing) or len(kept))
    things = [Things() for _ in range(remembered.REMEMBERED + 1)]
    numbers = [make(remembered.ByIdentity(thing)) for thing in things]
    assert make(remembered.ByIdentity(things[-1])) == numbers[-1]
    # The first one gave way to the last one. Equal things are not the same.
    assert make(remembered.ByIdentity(things[0])) == len(things) + 1
    # What cannot be hashed is made each time.
    assert make(np.zeros(2)) != make(np.zeros(2))


FACTOR, PAIR, JAX_FACTOR = 1.0, (1.0, 11.0), jnp.float32(1)


def triple(factor):
    return 3 * factor


FUNCTION = float


def read_global():
    return FACTOR


class Weight:
    def __init__(self):
        self.array, self.listed, self.named = np.ones(1, np.float32), [1.0], {"factor": 1.0, "other": 3.0}
        self.number, self.options, self.few = 1.0, argparse.Namespace(factor=1.0), {1.0}

    def __call__(self):
        return self.number


def change(name, value):
    return lambda _: globals().update({name: value})


@pytest.mark.parametrize(
    ("read", "change"),
    [
        (lambda weight: jnp.asarray(weight.array)[0], lambda weight: weight.array.fill(3)),
        (lambda weight: weight.listed[0], lambda weight: weight.listed.append(weight.listed.pop() + 2)),
        (lambda weight: weight.named["factor"], lambda weight: weight.named.update(factor=3.0)),
        (lambda weight: min(weight.named.items())[1], lambda weight: weight.named.update(factor=3.0, other=1.0)),
        (lambda weight: weight.number, lambda weight: setattr(weight, "number", 3.0)),
        (lambda weight: weight(), lambda weight: setattr(weight, "number", 3.0)),
        (lambda weight: weight.options.factor, lambda weight: setattr(weight.options, "factor", 3.0)),
        (lambda weight: max(weight.few), lambda weight: weight.few.add(3.0)),
        (lambda _: FACTOR, change("FACTOR", 3.0)),
        (lambda _: read_global(), change("FACTOR", 3.0)),
        (lambda _: PAIR[0], change("PAIR", (11.0, 1.0))),
        (lambda _: JAX_FACTOR, change("JAX_FACTOR", jnp.float32(3))),
        (lambda _: FUNCTION(1), change("FUNCTION", triple)),
    ],
    ids=(
        *("array", "list", "dict", "values that change places", "number", "number of a callable", "namespace", "set"),
        *("global", "global of a function", "tuple", "array of JAX", "function"),
    ),
)
def test_a_value_that_a_loss_reads_and_that_changed_between_two_runs_is_the_new_one(read, change, monkeypatch):
    for name in ("FACTOR", "PAIR", "JAX_FACTOR", "FUNCTION"):
        monkeypatch.setitem(globals(), name, globals()[name])
    weight, model = Weight(), tiny_model()
    usual = model.task.loss

    def loss(outputs, y, mask):
        return read(weight) * usual(outputs, y, mask)

    method = make_method("fedavg", model._replace(task=model.task._replace(loss=loss)), **HYPER_PARAMETERS)

    def scores(method):
        *_, last = simulate.run(method, DATA, Settings(rounds=2), jax.random.key(0))
        return last.trained["loss"]

    first = scores(method)
    with compilations() as again:
        np.testing.assert_array_equal(scores(method), first)
    assert set(again) <= {"init"}
    change(weight)
    assert (scores(method) != first).all()


def test_engines_are_kept_by_the_shapes_of_the_data():
    """So that a process which trains on many federations does not keep the programs of all of them."""
    method = make_method("fedavg", tiny_model(), **HYPER_PARAMETERS)

    def round_of(data):
        return build.compiled(method, method, None, Settings(rounds=1), None, data, donate=False).round.func

    assert round_of(DATA) is round_of(jax.tree.map(jnp.zeros_like, DATA))
    longer = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf]), DATA)
    assert round_of(DATA) is not round_of(longer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state_on": "host"}, "state_on and donate are for a run without an engine"),
        ({"donate": True}, "state_on and donate are for a run without an engine"),
        ({"mesh": True}, "engine was built with another mesh"),
        ({"drop_rate": 0.5}, "engine was built with drop_rate 0.0, and settings has 0.5"),
        ({"method": True}, "engine was built with another method"),
        ({"engine": 3}, "engine must be an Engine or None, not 3"),
    ],
)
def test_an_engine_of_something_else_is_refused(options, message):
    method, other = (make_method("local", tiny_model(), **HYPER_PARAMETERS) for _ in range(2))
    settings = Settings(rounds=1, drop_rate=options.pop("drop_rate", 0.0))
    used = other if options.pop("method", False) else method
    if options.pop("mesh", False):
        options["mesh"] = simulate.client_mesh()
    options = {"engine": simulate.build(method, Settings(rounds=1))} | options
    with pytest.raises(InvalidInput, match=message):
        simulate.run(used, DATA, settings, jax.random.key(0), **options)


def test_a_classifier_of_targets_that_are_no_classes_is_refused():
    rows = np.random.default_rng(0).normal(size=(20, 6)).astype(np.float32)
    numbers = federate(dict.fromkeys("ab", (rows, rows[:, 0])))
    method = make_method("fedavg", models.mlp((6,), 3, hidden=(4,)), **HYPER_PARAMETERS)
    with pytest.raises(InvalidInput, match="targets are not classes: give it another task"):
        next(simulate.run(method, numbers, Settings(rounds=1), jax.random.key(0)))


def test_settings_about_transfers_and_types_change_nothing():
    federation, settings = tiny_federation((4, 3)), Settings(rounds=2, before_aggregation=True)
    method, key = tiny_method("fedavg"), jax.random.key(0)

    def states():
        for result in simulate.run(method, federation, settings, key):
            # The caller's own settings hold between rounds.
            yield result.state.server, jax.config.jax_numpy_dtype_promotion

    want, usual = zip(*states(), strict=True)
    with jax.numpy_dtype_promotion("strict"), jax.transfer_guard("disallow"):
        got, strict = zip(*states(), strict=True)
    assert (usual, strict) == (("standard",) * 2, ("strict",) * 2)
    jax.tree.map(np.testing.assert_array_equal, got, want)
