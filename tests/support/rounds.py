"""Rounds of the tiny model's methods, with programs that tests share: compiling is most of what tests of methods do.

Real hyper-parameters are inputs of a program, and so are seeds, data and the number of rounds. Runs that differ in
nothing else are compiled once in a process.
"""

import functools

import jax
import numpy as np
from problems import tiny_model
from trees import row

from pfl_jax import Settings, simulate, tasks
from pfl_jax.data import client_data
from pfl_jax.methods import make_method
from pfl_jax.methods.factories import hyper_parameters


class Last:
    """The last of some rounds, with the names of `simulate.RoundResult`."""

    def __init__(self, state, outcome, evaluate):
        self.state, self.info = state, outcome.info
        self.cohort = np.asarray(outcome.cohort.clients)
        self.trained = jax.tree.map(np.asarray, state.trained)
        self._evaluate = evaluate

    @functools.cached_property
    def received(self):
        """Scores [N] of what every client would deploy now; compiled for the tests that ask for it."""
        return jax.tree.map(np.asarray, self._evaluate(self.state))


def _split(factory, given):
    """(real hyper-parameters, defaults among them; what a program is compiled for, hashable)."""
    # Real ones are traced, out of their range too.
    others = {name: value for name, value in given.items() if not isinstance(value, float)}
    every = hyper_parameters(factory, others) | given
    reals = {name: value for name, value in every.items() if isinstance(value, float)}
    return reals, tuple(sorted((name, value) for name, value in given.items() if name not in reals))


@functools.cache
def _programs(factory, fixed, auc):
    """(init, round, evaluate) of an engine, each with the real hyper-parameters before its own arguments."""

    def engine(reals):
        return simulate.build(make_method(factory, tiny_model(), **dict(fixed), **reals), Settings(rounds=1))

    return (
        jax.jit(lambda reals, data, key: engine(reals).init(data, key)),
        jax.jit(
            lambda reals, data, state, size: engine(reals).round(data, state, size), static_argnums=3, donate_argnums=2
        ),
        jax.jit(lambda reals, data, state: engine(reals).evaluate(data, state)),
    )


def first_state(factory, data, seed, **given):
    """The state before the first round, as `simulate.run` has it."""
    reals, fixed = _split(factory, given)
    # Constants may stand in place of the AUC, see every_test.py: that is another program.
    init, _, _ = _programs(factory, fixed, tasks.macro_auc)
    return init(reals, data, jax.random.key(seed))


def last_round(factory, data, seed, rounds, participation=1.0, change=lambda state: state, **given):
    """The last of so many rounds, as `simulate.run` has it, after a change of the state before the first."""
    reals, fixed = _split(factory, given)
    _, round_, evaluate = _programs(factory, fixed, tasks.macro_auc)
    size = Settings(rounds=rounds, participation=participation).cohort_size(data.num_clients, 0)
    state = change(first_state(factory, data, seed, **given))
    for _ in range(rounds):
        state, outcome = round_(reals, data, state, size)
        assert outcome.finite.all()
        assert outcome.server_finite
    return Last(state, outcome, functools.partial(evaluate, reals, data))


def local_results(method, data, state, index=0):
    """Results of all clients' training in a round from this state, one client after another."""
    key, local = jax.random.fold_in(state.key, index), jax.jit(method.local)
    return [
        local(jax.random.fold_in(key, i), state.server, row(state.clients, i), client_data(data, i, "train"))
        for i in range(data.num_clients)
    ]
