"""Scores of each client's model on the examples of every client: its own, other clients', or corrupted examples."""

import jax
import jax.numpy as jnp
import numpy as np

from pfl_jax.base import Method, Scores, State
from pfl_jax.data.federated import FederatedData, client_data
from pfl_jax.engine.body import chain_of
from pfl_jax.engine.cohort import RoundSettings
from pfl_jax.engine.rounds import RoundProgram, checked_predict
from pfl_jax.primitives.metrics import score
from pfl_jax.schedules import MethodSchedule, at_round


def cross_scores(
    method: Method | MethodSchedule,
    data: FederatedData,
    state: State,
    on: FederatedData | None = None,
    settings: RoundSettings | None = None,
) -> Scores:
    """Scores of the model that each client would deploy now, on the test examples of every client.

    Args:
      method, data: method and data of the run, with N clients.
      state: a state of the run, such as `RoundResult.state`.
      on: federation of M clients on whose test examples the models are scored. Inputs and classes must be like
        the run's, as in the result of `pfl_jax.data.corruption.corrupted`; None for `data`.
      settings: settings of the run, if it had attackers (they deploy the models they trained) or clients took turns.

    Returns:
      `Scores` with leaves [N, M], NumPy arrays: row i for the model of client i, column j for the examples of client j.
      If `on` is None, the diagonal has the scores of the protocol `received`.

    Raises:
      InvalidInput: the outputs of the method do not fit the classes of `on`.

    Example:
      >>> import jax
      >>> from pfl_jax import LocalTraining, Settings, data, methods, models, run
      >>> from pfl_jax.cross_evaluation import cross_scores
      >>> dataset = data.load("digits")
      >>> federation = data.federate(dataset, data.partition.iid(dataset, num_clients=4, train_size=20, test_size=10))
      >>> method = methods.fedper(models.mlp(dataset.input_shape, dataset.num_classes), LocalTraining(lr=0.1))
      >>> *_, last = run(method, federation, Settings(rounds=1), jax.random.key(0))
      >>> cross_scores(method, federation, last.state)["accuracy"].shape
      (4, 4)
    """
    on, settings, programs, rows = data if on is None else on, settings or RoundSettings(), {}, []
    for client in range(data.num_clients):
        network, server, chain = chain_of(method, settings, state, data.num_clients, client)
        if network not in programs:
            programs[network] = jax.jit(_scores_of_client(method, settings, network))
        rows.append(programs[network](data, on, server, state.key, state.round, chain))
    return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)


def _scores_of_client(method, settings, network):
    """Function that gives the scores, leaves [M], of the model of a client with this network."""
    program, own = RoundProgram(method, settings, network=network), at_round(method, 0, network or 0)

    def scores(data, on, server, *of_client):
        personal = program.personal(data, server, *of_client)

        def of_examples(other):
            return score(checked_predict(own, on), personal, client_data(on, other, "test"), own.task)

        return jax.lax.map(of_examples, jnp.arange(on.num_clients))

    return scores
