"""What a method's clients deploy, as log-probabilities: accuracies are often 1.0 on the tests' problems."""

from functools import partial

import jax

from pfl_jax.data import client_data
from pfl_jax.primitives import gather


def log_probabilities(method, examples=None, *, protocols=("received", "trained")):
    """Compiled (data, state) -> what clients deploy, and after one more training: {protocol: [N, examples, K]}."""

    def one(data, state, client):
        key, kept = jax.random.fold_in(state.key, client), gather(state.clients, client)
        train, test = (client_data(data, client, split) for split in ("train", "test"))
        personals = {}
        if "received" in protocols:
            personals["received"] = method.personalize(key, state.server, kept, train)
        if "trained" in protocols:
            personals["trained"] = method.local(key, state.server, kept, train).personal
        return {
            protocol: jax.nn.log_softmax(method.predict(personal, test.x[:examples]))
            for protocol, personal in personals.items()
        }

    @jax.jit
    def everyone(data, state):
        return jax.lax.map(partial(one, data, state), jax.numpy.arange(data.train_count.shape[0]))

    return everyone
