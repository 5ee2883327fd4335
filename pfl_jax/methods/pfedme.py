"""Personal models as proximal points of the global one (Dinh, Tran, Nguyen 2020)."""

import jax

from pfl_jax.base import LocalResult, Method, Model, Privacy
from pfl_jax.methods.factories import OWN_GRADIENTS, method_factory
from pfl_jax.primitives.aggregation import mean_by_size
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import proximal, supervised_loss
from pfl_jax.primitives.optimizers import descend, initial_state
from pfl_jax.primitives.tree import interpolate
from pfl_jax.validation import Count, NotNegative


@method_factory
def pfedme(
    model: Model,
    training: LocalTraining = LocalTraining(momentum=0.0),
    *,
    lam: NotNegative = 10.0,
    inner_steps: Count = 5,
    personal_lr: NotNegative | None = None,
    server_lr: NotNegative = 1.0,
) -> Method:
    """pFedMe: clients descend on the Moreau envelopes of their losses.

    From w_i = t = w, for every mini-batch of E epochs:

        t <- inner_steps of SGD from t on  CE(t) + (lambda / 2) ||t - w_i||^2  on this mini-batch
        w_i <- w_i - lr lambda (w_i - t)

    The server updates w <- w + server_lr (sum_i beta_i w_i - w). The personal model is t.

    Args:
      training: recipe of local training. lr is the learning rate of w_i, and lr times lam should be below 1. Momentum,
        weight decay, optimizer and clipping apply to the steps of the personal model; their state is initialized anew
        for every mini-batch.
      lam: strength lambda of the proximal term between t and w_i.
      inner_steps: steps K of the personal model on each mini-batch.
      personal_lr: learning rate of the personal model; None for lr.
      server_lr: learning rate of the server, the paper's beta; 1 takes the mean of the clients' models.

    Returns:
      A `Method` with the global model as server state and the last t as client state. Both evaluation protocols
      score t.
      Trees: server model; client model.

    Reference:
      Dinh, Tran, Nguyen. Personalized Federated Learning with Moreau Envelopes. NeurIPS 2020. Algorithm 1.

    Deviations:
      Algorithm 1 solves for t up to an accuracy and has R local rounds of one mini-batch each; here t takes K steps, as
      in the paper's experiments, and R follows from E epochs. t starts from the received model and continues from one
      mini-batch to the next, as in the released code, whose steps have no momentum either; its weight decay is 1e-3.
      In that code every client trains in every round and the w_i of a cohort are averaged; here only the cohort trains.
      Clients are weighted by their numbers of examples, as in the released code. A client that was never trained
      deploys the initial model.
    """
    training.require_lr("pfedme's step of w_i")
    optimizer = (training if personal_lr is None else training.replace(lr=personal_lr)).transformation()

    def train(key, server, client, data):
        def step(models, batch, key):
            local, personal = models

            loss = supervised_loss(model, lambda params: lam * proximal(params, local))

            def inner(index, carry):
                params, opt_state = carry
                gradient, statistics = jax.grad(loss, has_aux=True)(params, batch, jax.random.fold_in(key, index))
                return descend(optimizer, gradient, statistics, params, opt_state)

            personal, _ = jax.lax.fori_loop(0, inner_steps, inner, (personal, initial_state(optimizer, personal)))
            return jax.tree.map(lambda w, t: w - training.lr * lam * (w - t), local, personal), personal

        local, personal = training.fold(key, (server, server), data, step)
        return LocalResult(client=personal, message=mean_by_size(local, data), personal=personal)

    def aggregate(key, server, clients, messages, cohort):
        return interpolate(server_lr, messages.value, server), clients, {}

    return Method(
        init_server=model.init,
        init_client=lambda key, server, data: server,
        local=train,
        aggregate=aggregate,
        personalize=lambda key, server, client, data: client,
        predict=model.apply,
        privacy=Privacy(refused=OWN_GRADIENTS, clients=()),
    )
