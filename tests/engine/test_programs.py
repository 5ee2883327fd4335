"""Another run of the same method compiles nothing, and what is shared does not depend on what differs."""

import contextlib
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import HYPER_PARAMETERS, tiny_federation, tiny_model

from pfl_jax import simulate, sweep
from pfl_jax.engine import chunking
from pfl_jax.engine.programs import KEPT, kept
from pfl_jax.engine.simulate import Settings
from pfl_jax.methods import make_method

pytestmark = pytest.mark.without_f1_auc

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
def test_another_run_of_a_method_compiles_nothing(state_on):
    method = make_method("fedper", tiny_model(), **HYPER_PARAMETERS)

    def play(seed, state=None, **settings):
        settings = Settings(participation=0.5, **settings)
        return list(simulate.run(method, DATA, settings, jax.random.key(seed), state=state, state_on=state_on))

    with compilations() as first:
        *_, last = play(0, rounds=2)
    assert first
    with compilations() as later:
        other = play(1, rounds=3, eval_every=2)
        continued = play(2, last.state, rounds=3)
    # A state to continue from is copied, and its shapes are compared with a new one's, which is traced for it.
    assert set(later) <= {"init", "copy", "jit(copy)"}
    assert len(continued) == 1
    assert other[1].trained.loss.tolist() != last.trained.loss.tolist()
    with compilations() as others:
        list(simulate.run(method, DATA, Settings(rounds=1, chunk=2), jax.random.key(0), state_on=state_on))
    assert others


def test_another_sweep_compiles_nothing():
    def make(lr):
        return make_method("fedavg", tiny_model(), **HYPER_PARAMETERS | {"lr": lr})

    def play(seeds, rates, rounds):
        keys = jax.vmap(jax.random.key)(jnp.array(seeds))
        return list(sweep.run(make, DATA, Settings(rounds=rounds), keys, {"lr": jnp.array(rates)}))

    first = play([0, 1], [0.1, 0.2], 1)
    with compilations() as later:
        second = play([2, 3], [0.1, 0.3], 2)
    # The shapes of the model are traced, to see whether it has convolutions.
    assert set(later) <= {"init"}
    assert (first[0].received.loss != second[0].received.loss).any()


def test_programs_do_not_depend_on_settings_of_the_loop():
    method = make_method("local", tiny_model(), **HYPER_PARAMETERS)
    loop = {"rounds": 9, "participation": 0.5, "full_last_round": True, "eval_every": 3, "before_aggregation": True}
    plain = Settings(rounds=5)
    for name, value in loop.items():
        changed = replace(plain, **{name: value})
        assert plain != changed
        assert plain.of_programs() == changed.of_programs()

    def programs(settings):
        engine = simulate.build(method, settings)
        state = jax.eval_shape(engine.init, DATA, jax.random.key(0))
        one = jax.make_jaxpr(engine.round, static_argnums=2)(DATA, state, 3)
        return str((one, jax.make_jaxpr(engine.evaluate)(DATA, state)))

    # Both with one method, whose functions' addresses are in the text.
    assert programs(plain) == programs(Settings(**loop))


def test_settings_of_programs_stay():
    settings = {"straggler_fraction": 0.5, "straggler_rate": 0.5, "drop_rate": 0.5, "chunk": 2, "eval_clients": 3}
    settings |= {"attack": "signs", "attackers": 0.5, "attack_scale": 2.0}
    plain = Settings(rounds=5, attack="noise").of_programs()
    for name, value in settings.items():
        more = {"attack": "noise"} | {name: value}
        assert Settings(rounds=5, **more).of_programs() != plain


def test_the_last_results_are_kept():
    made = []

    @kept
    def build(method, settings, *, scale=1):
        made.append(method)
        return [method]

    assert build("a", 1) is build("a", 1)
    assert build("a", 1, scale=2) is not build("a", 1)
    for number in range(KEPT):
        build(number, 1)
    build("a", 1)
    assert made == ["a", "a", *range(KEPT), "a"]
    # Methods with fields that cannot be hashed are built each time.
    assert build(["b"], 1) == [["b"]]
    assert build(["b"], 1) is not build(["b"], 1)

    def fails():
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        kept(fails)()


@pytest.mark.parametrize("share", [chunking.wasted_step_share, chunking.idle_device_share])
def test_the_unused_time_of_a_later_round_compiles_nothing(share):
    def play(counts):
        return share(np.array(counts), batch_size=10, chunk=1, devices=2)

    play([30, 20, 10])
    with compilations() as later:
        play([40, 20, 10])
    assert not later
