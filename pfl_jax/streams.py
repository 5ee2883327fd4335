"""Numbers of the random streams that are folded into keys beside a counter.

A key gives one random stream for each number folded into it. Rounds, clients, epochs and passes count from 0; the named
streams count down from 2**32 - 1, the largest number that `jax.random.fold_in` takes, so that no counter reaches them.
Two uses of the same key need two numbers; a number may serve two different keys. This module imports nothing, so that
every layer can name its streams here.
"""

LARGEST = 2**32 - 1
"""The largest number that `jax.random.fold_in` takes."""

COUNTER_LIMIT = 2**31
"""Rounds, clients, epochs and passes are int32: they stay below this."""

# Of a run's key, beside its rounds.
INITIALIZATION = LARGEST
COHORT = LARGEST - 1
EVALUATION = LARGEST - 2
STRAGGLERS = LARGEST - 3
DROPOUTS = LARGEST - 4
NEWCOMERS = LARGEST - 5

# Of the key of a client's local work, beside the epochs of `pfl_jax.primitives.local_sgd.fold_batches`.
PERSONAL_MODEL = LARGEST
AUGMENTATION = LARGEST - 6
AGGREGATION_WEIGHTS = LARGEST - 7

RUN = {
    "initialization": INITIALIZATION,
    "cohort": COHORT,
    "evaluation": EVALUATION,
    "stragglers": STRAGGLERS,
    "dropouts": DROPOUTS,
    "newcomers": NEWCOMERS,
}
"""Streams of a run's key, by what they draw."""

LOCAL = {
    "personal_model": PERSONAL_MODEL,
    "augmentation": AUGMENTATION,
    "aggregation_weights": AGGREGATION_WEIGHTS,
}
"""Streams of the key of a client's local work: Ditto's personal model, augmented inputs, FedALA's weights."""
