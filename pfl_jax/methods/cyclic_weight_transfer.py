"""Model that goes from client to client (Chang et al. 2018)."""

import jax
import jax.numpy as jnp

from pfl_jax.base import HandOver, LocalResult, Method, Model, Privacy
from pfl_jax.messages import NOT_RECEIVED
from pfl_jax.methods.factories import method_factory
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import supervised_loss
from pfl_jax.primitives.tree import choose, gather


@method_factory
def cyclic_weight_transfer(model: Model, training: LocalTraining = LocalTraining()) -> Method:
    """Cyclic weight transfer: clients train one model in turn.

        w_0 = w;   w_i = w_{i-1} after E epochs on client i's data;   w <- w_M

    Args:
      training: recipe of each client's local training in its turn.

    Returns:
      A `Method` with w as server state and no client state. Clients take turns in the order of their numbers, and
      absent ones are passed over. Under `received` all clients deploy w; under `trained` each deploys its w_i.
      Trees: server model; client nothing.

    Reference:
      Chang, Balachandar, Lam, Yi, Brown, Beers, Rosen, Rubin, Kalpathy-Cramer. Distributed Deep Learning Networks among
      Institutions for Medical Imaging. Journal of the American Medical Informatics Association 25(8), 2018. "Cyclical
      weight transfer".

    Deviations:
      Momentum starts at zero in each turn. The paper passes the weights on after a fixed number of epochs, `epochs`
      here, and has four institutions that all take part in every cycle.
    """

    def turn(key, server, client, data):
        return training.fit(key, server, data, supervised_loss(model))

    def aggregate(key, server, clients, messages, cohort):
        last = jnp.max(jnp.where(cohort.present, jnp.arange(cohort.present.size), -1))
        return choose(last >= 0, gather(messages, last), server), clients, {}

    return Method(
        init_server=model.init,
        init_client=lambda key, server, data: (),
        local=lambda key, server, client, data: LocalResult((), server, server),
        aggregate=aggregate,
        personalize=lambda key, server, client, data: server,
        predict=model.apply,
        trained_from=lambda server, client: jax.tree.map(lambda _: NOT_RECEIVED, server),
        privacy=Privacy(training.most_passes),
        hand_over=HandOver(turn),
    )
