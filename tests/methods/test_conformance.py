"""What every method must satisfy, run over METHODS; tests share compiled engines, which are nearly all the work."""

import json
import re
from pathlib import Path

import jax
import pytest
from golden import FILE, fingerprint, moved, numbers_of

from experiments.hyper_parameters import documented_info
from pfl_jax import Settings, simulate
from pfl_jax.engine import placement
from pfl_jax.methods import METHODS
from pfl_jax.testing import conformance
from pfl_jax.testing.comparison import assert_close
from pfl_jax.testing.problems import tiny_federation


@pytest.fixture(autouse=True, scope="module")
def _write_no_programs():
    """No other test has these programs: writing them to the disk would be a tenth of the time."""
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 3600)
    yield
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


KINDS = {"fedavg", "fedper", "knn_per", "fedem", "feddbe", "fedpac"}
"""A method of each kind: these run by default, since compiling takes nearly all of the time."""


@pytest.fixture(
    params=[name if name in KINDS else pytest.param(name, marks=pytest.mark.slow) for name in METHODS], scope="module"
)
def subject(request):
    """Each method in turn. All tests of one run together, so that its programs are compiled once and then dropped."""
    return conformance.Subject(METHODS[request.param])


REPRESENTATIVES = {"fedpac"}
"""A method with states of clients, messages of every kind, and a server that computes something for each client."""

representatives = pytest.mark.parametrize(
    "subject",
    [name if name in REPRESENTATIVES else pytest.param(name, marks=pytest.mark.slow) for name in METHODS],
    indirect=True,
)
"""For a test that compiles each method for itself: by default it runs for `REPRESENTATIVES` alone."""


def test_structure_shapes_and_types_stay_the_same(subject):
    conformance.check_structure(subject)


def test_what_clients_trained_from_is_like_their_messages(subject):
    conformance.check_trained_from(subject)


def test_a_round_is_traced_once(subject):
    conformance.check_one_trace(subject)


# With the problem's own values feddbe oscillates, and a rectified feature of gpfl is so close to zero in the third
# round that chunks differ by 5e-5 in float32, by 3e-14 in float64.
STEADY = {METHODS["feddbe"]: {"kappa": 5.0}, METHODS["gpfl"]: {"lr": 0.08}}
"""Hyper-parameters with which rounding does not decide what a method learns on the tiny problem."""


def steady(subject):
    """The subject, with the values of `STEADY` if it has any."""
    values = STEADY.get(subject.factory)
    return conformance.Subject(subject.factory, **values) if values else subject


@representatives
def test_chunks_and_padding_change_nothing(subject):
    conformance.check_chunks_and_padding(steady(subject))


@representatives
def test_devices_change_nothing(subject):
    assert jax.device_count() > 1
    conformance.check_devices(steady(subject))


@pytest.mark.slow
def test_devices_that_own_their_clients_change_nothing(subject):
    # On eight devices some own nobody.
    data = placement.place(tiny_federation(), simulate.client_mesh())
    got = conformance.play(simulate.build(subject.build(), Settings(rounds=1)).jit(data.mesh), data)
    assert_close(got, subject.reference)


def test_permuting_clients_permutes_results(subject):
    conformance.check_order_of_clients(subject)


# The engine alone sees test sets, and examples that may be NaN are another program.
@representatives
def test_nothing_of_the_test_set_reaches_the_states(subject):
    conformance.check_test_set(subject)


def test_clients_outside_the_cohort_stay_as_they_were(subject):
    conformance.check_clients_outside(subject)


@representatives
def test_clients_that_are_absent_do_not_count(subject):
    conformance.check_absent(subject)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        # Solvers have tests of their own, with empty clients.
        pytest.param(name, other, marks=pytest.mark.slow if other.startswith("solver") else ())
        for name, factory in METHODS.items()
        for other in conformance.Subject(factory).others()
    ],
)
def test_clients_that_are_absent_do_not_count_with_any_option(name, other):
    conformance.check_absent(conformance.Subject(METHODS[name]).others()[other])


def test_a_continued_run_is_the_uninterrupted_one(subject):
    conformance.check_resumption(subject)


def test_the_same_seed_gives_the_same_result_and_another_one_does_not(subject):
    conformance.check_seeds(subject)


@representatives
def test_vmap_over_seeds_and_learning_rates(subject):
    conformance.check_vmap(subject)


def test_info_is_what_the_docstring_lists(subject):
    """Names, number of axes, and which axes are the cohort's."""
    engine = simulate.build(subject.build(), Settings(rounds=1))
    state = jax.eval_shape(engine.init, tiny_federation(), jax.random.key(0))
    _, outcome = jax.eval_shape(lambda data, state: engine.round(data, state, 2), tiny_federation(), state)
    documented = documented_info(subject.factory)
    assert outcome.info.keys() == documented.keys()
    for name, leaf in outcome.info.items():
        letters = [one for one in re.match(r"\[(.*?)\], \w", documented[name])[1].split(", ") if one]
        cohort = "cohort" if "cohort" in letters else "M"
        assert [size == 2 for size in leaf.shape] == [letter == cohort for letter in letters], (name, leaf.shape)


def test_some_test_reads_each_part_of_every_info():
    """By its name: what it must be, the tests of the methods' equations say."""
    names = {name for factory in METHODS.values() for name in documented_info(factory)}
    texts = (path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert names <= {name for text in texts for name in re.findall(r'\binfos?(?:\[-1\])?\["(\w+)"\]', text)}


def test_predictions_and_learning(subject):
    conformance.check_learning(steady(subject))


def test_golden_values(subject):
    name = next(name for name, factory in METHODS.items() if factory is subject.factory)
    stored, got = numbers_of(json.loads(FILE.read_text())[name]), fingerprint(subject.build(), subject.compiled())
    assert got.keys() == stored.keys()
    where = moved(stored, got)
    change = f"{where}: {got.get(where)} in place of {stored.get(where)}"
    assert not where, f"{change}; after an intended change: python tests/support/golden.py {name}"
