"""pfl_jax's side of the comparison, compiled before the clock starts."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lab.benchmark import workload
from lab.benchmark.workload import Scale
from pfl_jax import simulate
from pfl_jax.backends import BACKENDS
from pfl_jax.base import Method, Model, Scores
from pfl_jax.data.federated import FederatedData, client_data, spread
from pfl_jax.engine.mapping import map_places
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import supervised_loss


def everywhere(mesh: Mesh | None, tree: Any) -> Any:
    """Copy of the arrays on every device of the mesh."""
    return tree if mesh is None else jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


@contextlib.contextmanager
def convolutions(form: str) -> Iterator[None]:
    """Use this form of the convolutions on every backend in programs traced inside, see `pfl_jax.backends`."""
    usual = dict(BACKENDS)
    if form != "auto":
        # Functions that were traced before keep their form.
        jax.clear_caches()
        BACKENDS.update({name: choices._replace(convolution=form) for name, choices in usual.items()})
    try:
        yield
    finally:
        if form != "auto":
            jax.clear_caches()
            BACKENDS.update(usual)


@dataclass(frozen=True)
class Program:
    """Compiled program with its arguments; each call runs it, and waits for the end.

    Attributes:
      run: the call.
      seconds: of tracing and compilation.
      memory: bytes of its arguments, results and temporaries, as far as the compiler tells.
    """

    run: Callable[[], Any]
    seconds: float
    memory: int

    def __call__(self) -> Any:
        return self.run()


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
) -> Program:
    """Local training alone, compiled: each call trains the first clients from equal weights.

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
      A program whose calls return the trained parameters [D, W, ...] in the places of D devices.
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
    began = time.perf_counter()
    with convolutions(form):
        program = jax.jit(train).lower(*arguments).compile()
    seconds, found = time.perf_counter() - began, program.memory_analysis()
    sizes = [getattr(found, f"{kind}_size_in_bytes", 0) for kind in ("argument", "output", "temp")]
    return Program(lambda: jax.block_until_ready(program(*arguments)), seconds, sum(sizes))


class Rounds:
    """Rounds of all clients of a federation on all devices, compiled; every call of `round` runs the next one.

    Args:
      method, data: as of `pfl_jax.build`.
      evaluation: whether `evaluate` is compiled too.
    """

    def __init__(self, method: Method, data: FederatedData, *, evaluation: bool = True):
        mesh = simulate.client_mesh()
        settings = simulate.Settings(rounds=1, chunk=workload.usual_chunk())
        engine: Any = simulate.build(method, settings, mesh).jit(mesh, donate=True)
        self._data = everywhere(mesh, data)
        self.state = everywhere(mesh, engine.init(self._data, jax.random.key(0)))
        self._round = engine.round.lower(self._data, self.state, data.num_clients).compile()
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


def operations(model: Model | None = None, input_shape: tuple[int, ...] | None = None) -> float:
    """Floating-point operations of a step of local training for one example, as XLA counts them.

    Args:
      model, input_shape: by default the workload's.
    """
    model, shape = model or workload.network(), input_shape or workload.dataset().input_shape
    pictures = jax.ShapeDtypeStruct((workload.FULL.batch_size, *shape), jnp.float32)
    gradient = jax.grad(lambda params, x: model.apply(params, x).sum())
    with convolutions("lax"):
        lowered = jax.jit(gradient).lower(jax.eval_shape(model.init, jax.random.key(0)), pictures)
    counted = lowered.cost_analysis()
    assert counted is not None
    return counted["flops"] / workload.FULL.batch_size
