"""Another run with the same engine compiles nothing, and the engine does not depend on what differs."""

import contextlib

import jax
import numpy as np
import pytest
from problems import HYPER_PARAMETERS, tiny_federation, tiny_method, tiny_model

from pfl_jax import InvalidInput, Settings, models, simulate
from pfl_jax.data import federate
from pfl_jax.engine.store import OnHost
from pfl_jax.methods import make_method

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
def test_another_run_with_an_engine_compiles_nothing(state_on):
    method, common = tiny_method("fedper"), {"participation": 0.5, "chunk": 2}
    engine = simulate.build(method, Settings(rounds=1, **common), store=OnHost() if state_on == "host" else None).jit()

    def play(seed, state=None, **settings):
        settings = Settings(**common, **settings)
        return list(simulate.run(method, DATA, settings, jax.random.key(seed), state=state, engine=engine))

    with compilations() as first:
        *_, last = play(0, rounds=2)
    assert first
    with compilations() as later:
        other = play(1, rounds=3, eval_every=2)
        continued = play(2, last.state, rounds=3)
    # A state to continue from is copied, and its shapes are compared with a new one's, which is traced for it.
    assert set(later) <= {"init", "copy", "jit(copy)"}
    assert len(continued) == 1
    assert other[1].trained["loss"].tolist() != last.trained["loss"].tolist()


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
    with pytest.raises(InvalidInput, match="targets are no classes: give it another task"):
        next(simulate.run(method, numbers, Settings(rounds=1), jax.random.key(0)))
