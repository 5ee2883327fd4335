"""Personal models that are regularized toward a global model (Li et al. 2021)."""

import jax

from pfl_jax.base import LocalResult, Method, Model, Privacy
from pfl_jax.methods.factories import SIZE, method_factory
from pfl_jax.methods.fedavg import fedavg
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import proximal, supervised_loss
from pfl_jax.streams import PERSONAL_MODEL
from pfl_jax.validation import Epochs, NotNegative


@method_factory
def ditto(
    model: Model,
    training: LocalTraining = LocalTraining(),
    *,
    lam: NotNegative = 1.0,
    personal_epochs: Epochs = 5,
) -> Method:
    """Ditto: FedAvg, and on each client a personal model that is regularized toward the received one.

        w_i = E epochs of SGD from w on CE;   w = sum_i beta_i w_i
        v_i <- personal_epochs of SGD from v_i on  CE(v_i) + (lambda / 2) ||v_i - w||^2,  w as received

    The global model equals FedAvg's. With lambda = 0 personal models are trained as in local training.

    Args:
      training: recipe of local training for both models.
      lam: strength lambda of the regularization toward the received model.
      personal_epochs: local epochs of the personal model in a round.

    Returns:
      A `Method` with the global model as server state and v_i as client state. Both evaluation protocols score v_i.
      Trees: server model; client model.

    Reference:
      Li, Hu, Beirami, Smith. Ditto: Fair and Robust Federated Learning Through Personalization. ICML 2021.
      The algorithm Ditto.

    Deviations:
      Personal models start from the initial global model, as in the released code; the paper does not say where they
      start. The global model is trained by FedAvg, the paper's default; its robust aggregators are left out. The
      released code draws clients with probabilities proportional to their sizes and averages them equally. There each
      mini-batch serves one personal and one global step; here each model has its own mini-batches.
    """
    base = fedavg(model, training)
    personal_training = training.replace(epochs=personal_epochs)

    def train(key, server, client, data):
        loss = supervised_loss(model, lambda params: lam * proximal(params, server))
        personal = personal_training.fit(jax.random.fold_in(key, PERSONAL_MODEL), client, data, loss)
        # The same key as FedAvg, so that the global model equals FedAvg's batch for batch.
        return LocalResult(personal, base.local(key, server, (), data).message, personal)

    return base._replace(
        init_client=lambda key, server, data: server,
        local=train,
        personalize=lambda key, server, client, data: client,
        privacy=Privacy(personal_epochs + training.most_passes, (SIZE,), clients=()),
    )
