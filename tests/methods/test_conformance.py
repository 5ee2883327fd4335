"""What every method must satisfy, run over METHODS; tests share compiled engines, which are nearly all the work."""

import json
import re

import jax
import pytest
from golden import FILE, VALUES, fingerprint, moved, numbers_of

from experiments.spec.hyper_parameters import documented_info
from pfl_jax import Settings, simulate
from pfl_jax.engine import placement
from pfl_jax.methods import METHODS
from pfl_jax.testing import conformance
from pfl_jax.testing.comparison import assert_close


@pytest.fixture(autouse=True, scope="module")
def _write_no_programs():
    """No other test has these programs: writing them to the disk would be a tenth of the time."""
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 3600)
    yield
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


# With the problem's own values feddbe oscillates, and a rectified feature of gpfl is so close to zero in the third
# round that chunks differ by 5e-5 in float32, by 3e-14 in float64.
STEADY = {METHODS["feddbe"]: {"kappa": 5.0}, METHODS["gpfl"]: {"lr": 0.08}}
"""Hyper-parameters with which rounding does not decide what a method learns on the tiny problem."""


def steadily(check):
    """A check of the method with the values of `STEADY`, if it has any."""

    def checked(subject):
        values = STEADY.get(subject.factory)
        check(conformance.Subject(subject.factory, **values) if values else subject)

    return checked


def devices_that_own_their_clients_change_nothing(subject):
    # On eight devices some own nobody.
    data = placement.place(subject.data(), simulate.client_mesh())
    got = conformance.play(simulate.build(subject.build(), Settings(rounds=1)).jit(data.mesh), data)
    assert_close(got, subject.reference)


def info_is_what_the_docstring_lists(subject):
    """Names, number of axes, and which axes are the cohort's."""
    engine, data = simulate.build(subject.build(), Settings(rounds=1)), subject.data()
    state = jax.eval_shape(engine.init, data, jax.random.key(0))
    _, outcome = jax.eval_shape(lambda data, state: engine.round(data, state, 2), data, state)
    documented = documented_info(subject.factory)
    assert outcome.info.keys() == documented.keys()
    for name, leaf in outcome.info.items():
        letters = [one for one in re.match(r"\[(.*?)\], \w", documented[name])[1].split(", ") if one]
        cohort = "cohort" if "cohort" in letters else "M"
        assert [size == 2 for size in leaf.shape] == [letter == cohort for letter in letters], (name, leaf.shape)


def golden_values(subject):
    name = next(name for name, factory in METHODS.items() if factory is subject.factory)
    if name in VALUES:
        subject = conformance.Subject(subject.factory, **VALUES[name])
    stored, got = numbers_of(json.loads(FILE.read_text())[name]), fingerprint(subject.build(), subject.compiled())
    assert got.keys() == stored.keys()
    where = moved(stored, got)
    change = f"{where}: {got.get(where)} in place of {stored.get(where)}"
    assert not where, f"{change}; after an intended change: another version, and python tests/support/golden.py {name}"


CHECKS = {name: check for name, check in conformance.CHECKS.items() if name != "options"} | {
    **{name: steadily(conformance.CHECKS[name]) for name in ("chunks_and_padding", "devices", "learning")},
    "devices_that_own": devices_that_own_their_clients_change_nothing,
    "info": info_is_what_the_docstring_lists,
    "golden": golden_values,
}

KINDS = {"fedavg", "fedper", "knn_per", "fedem", "feddbe", "fedpac"}
"""A method of each kind: these run by default, since compiling takes nearly all of the time."""

COMPILING = {"chunks_and_padding", "devices", "devices_that_own", "test_set", "absent", "vmap"}
"""Checks that compile each method for themselves: by default they run for fedpac alone, with states of clients,
messages of every kind, and a server that computes something for each client."""


def marks_of(name, check):
    by_default = name == "fedpac" and check != "devices_that_own" if check in COMPILING else name in KINDS
    return () if by_default else pytest.mark.slow


@pytest.fixture(scope="module")
def subject(request):
    """Each method in turn. All checks of one run together, so that its programs are compiled once and then dropped."""
    return conformance.Subject(METHODS[request.param])


@pytest.mark.parametrize(
    ("subject", "check"),
    [
        pytest.param(name, check, marks=marks_of(name, check), id=f"{name}-{check}")
        for name in METHODS
        for check in CHECKS
    ],
    indirect=["subject"],
)
def test_conformance_of(subject, check):
    CHECKS[check](subject)


def test_devices_are_several():
    assert jax.device_count() > 1


@pytest.mark.parametrize(
    ("name", "other"),
    [
        # The others test_absent_rows.py has by default, without training; drawn messages are no covariances.
        pytest.param(name, other, marks=() if other == "covariance=empirical" else pytest.mark.slow)
        for name, factory in METHODS.items()
        for other in conformance.Subject(factory).others()
    ],
)
def test_clients_that_are_absent_do_not_count_with_any_option(name, other):
    conformance.check_absent(conformance.Subject(METHODS[name]).others()[other])
