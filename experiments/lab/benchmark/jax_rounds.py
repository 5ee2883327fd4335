"""pfl_jax's side of the comparison, compiled before the clock starts."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.lab.benchmark import workload
from experiments.lab.benchmark.workload import Scale
from pfl_jax import simulate
from pfl_jax.base import Method, Model, Params, Scores
from pfl_jax.data.federated import FederatedData, client_data
from pfl_jax.data.places import spread
from pfl_jax.engine.mapping import map_places
from pfl_jax.networks.convolution import conv2d
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import supervised_loss


def everywhere(mesh: Mesh | None, tree: Any) -> Any:
    """Copy of the arrays on every device of the mesh."""
    return tree if mesh is None else jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


@contextlib.contextmanager
def convolutions(form: str) -> Iterator[None]:
    """Use this form of the convolutions in models traced inside, see `pfl_jax.networks.convolution`."""

    def intercept(call, args, kwargs, context):
        return conv2d(*args, **kwargs, form=form) if context.method_name == "convolve" else call(*args, **kwargs)

    with nn.intercept_methods(intercept):
        yield


def local_training(
    data: FederatedData,
    scale: Scale,
    *,
    clients: int,
    epochs: int,
    chunk: int | None,
    mesh: Mesh | None,
    form: str = "auto",
    model: Model | None = None,
) -> Callable[[], Params]:
    """Local training alone, compiled: each call trains the first clients from equal weights, and waits for the end.

    Args:
      data: of all clients.
      scale: recipe of local training.
      clients: M, those that train.
      epochs: of their training.
      chunk: clients under one vmap on a device.
      mesh: devices that share the clients; None for one device.
      form: of the convolutions.
      model: by default the workload's.

    Returns:
      A function that returns the trained parameters [D, W, ...] in the places of D devices.
    """
    model = workload.network() if model is None else model
    training = LocalTraining(scale.lr, scale.momentum, scale.weight_decay, scale.batch_size, epochs)
    loss = supervised_loss(model)

    def one(shared, client):
        data, params, key = shared
        return training.fit(jax.random.fold_in(key, client), params, client_data(data, client, "train"), loss)

    def train(data, params, key):
        ids = jnp.asarray(spread(clients, 1 if mesh is None else mesh.size))
        rows, _ = map_places(
            lambda *words: (one(*words), ()), (data, params, key), ids, ids < clients, chunk=chunk, mesh=mesh
        )
        return rows

    arguments = everywhere(mesh, (data, model.init(jax.random.key(0)), jax.random.key(1)))
    with convolutions(form):
        program = jax.jit(train).lower(*arguments).compile()
    return lambda: jax.block_until_ready(program(*arguments))


class Rounds:
    """Rounds of a method over a federation on all devices, compiled; every call of `round` runs the next one.

    Args:
      method, data: as of `pfl_jax.build`.
      participation: share of the clients in a round.
      evaluation: whether `evaluate` is compiled too.
    """

    def __init__(self, method: Method, data: FederatedData, participation: float = 1.0, *, evaluation: bool = True):
        settings = simulate.Settings(rounds=1, participation=participation, chunk=workload.usual_chunk())
        mesh = simulate.client_mesh()
        self.cohort_size = settings.cohort_size(data.num_clients, 0)
        engine: Any = simulate.build(method, settings, mesh).jit(mesh, donate=True)
        self._data = everywhere(mesh, data)
        self.state = everywhere(mesh, engine.init(self._data, jax.random.key(0)))
        self._round = engine.round.lower(self._data, self.state, self.cohort_size).compile()
        self._evaluate = engine.evaluate.lower(self._data, self.state).compile() if evaluation else None

    def round(self) -> None:
        """Run one round and score every trained model."""
        self.state, _ = jax.block_until_ready(self._round(self._data, self.state))

    def evaluate(self) -> Scores:
        """Scores [N] of the models that the clients would deploy now."""
        assert self._evaluate is not None
        return jax.block_until_ready(self._evaluate(self._data, self.state))

    def both(self) -> None:
        """Run a round and evaluate after it."""
        self.round()
        self.evaluate()


def operations() -> float:
    """Floating-point operations of a step of local training for one example, as XLA counts them."""
    model = workload.network()
    pictures = jax.ShapeDtypeStruct((workload.FULL.batch_size, *workload.dataset().input_shape), jnp.float32)
    gradient = jax.grad(lambda params, x: model.apply(params, x).sum())
    with convolutions("lax"):
        lowered = jax.jit(gradient).lower(jax.eval_shape(model.init, jax.random.key(0)), pictures)
    counted = lowered.cost_analysis()
    assert counted is not None
    return counted["flops"] / workload.FULL.batch_size
