"""The same work as a plain PyTorch loop, one client after another, for comparison.

Written for this comparison, with the care that this package takes itself: pictures are normalized tensors before the
clock starts, pooling comes before activations. Needs PyTorch: requirements-bench.txt.
"""

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from lab.benchmark.workload import Scale
from pfl_jax.base import Params
from pfl_jax.data.federated import FederatedData, client_data

# By name, so that the type checker asks for nothing that may not be installed.
torch: Any = importlib.import_module("torch")
nn: Any = importlib.import_module("torch.nn")
functional: Any = importlib.import_module("torch.nn.functional")

# The GPU, if both sides can have it.
DEVICE: Any = torch.device("cuda" if jax.default_backend() == "gpu" and torch.cuda.is_available() else "cpu")


class Examples(NamedTuple):
    """Examples of one client in memory: x [n, C, H, W] and y [n]."""

    x: Any
    y: Any


def clients(data: FederatedData) -> list[Examples]:
    """Training examples of every client as tensors."""
    found = []
    for client in range(data.num_clients):
        one = jax.device_get(client_data(data, client, "train"))
        real = np.flatnonzero(one.mask)
        x, y = torch.from_numpy(one.x[real]), torch.from_numpy(one.y[real].astype(np.int64))
        found.append(Examples(x.permute(0, 3, 1, 2).contiguous().to(DEVICE), y.to(DEVICE)))
    return found


NETWORKS: dict[str, tuple[tuple[int, ...], Any]] = {
    "fedpac_cnn": ((0, 1, 1), nn.LeakyReLU(0.01)),
    "fedavg_cnn": ((0, 0), nn.ReLU()),
}
"""Network of `pfl_jax.networks.models` -> padding of each convolution, and the activation."""


class Network(nn.Module):
    """A network of NETWORKS with one hidden dense layer."""

    def __init__(self, params: Params, name: str = "fedpac_cnn"):
        """Start from the weights of its `init`."""
        super().__init__()
        backbone, (paddings, activation) = jax.device_get(params["backbone"]), NETWORKS[name]
        convolutions = [backbone[layer] for layer in sorted(backbone) if layer.startswith("conv")]
        blocks = []
        for weights, padding in zip(convolutions, paddings, strict=False):
            kernel = weights["kernel"]
            layer = nn.Conv2d(kernel.shape[2], kernel.shape[3], kernel.shape[0], padding=padding)
            _assign(layer, kernel.transpose(3, 2, 0, 1), weights["bias"])
            blocks += [layer, nn.MaxPool2d(2), activation]
        kernel = backbone["fc1"]["kernel"]
        # Rows of the dense layer are (row, column, channel) in JAX and (channel, row, column) in PyTorch.
        channels = convolutions[-1]["bias"].size
        side = round((kernel.shape[0] / channels) ** 0.5)
        rows = kernel.reshape(side, side, channels, -1).transpose(2, 0, 1, 3).reshape(kernel.shape)
        dense = nn.Linear(*kernel.shape)
        _assign(dense, rows.T, backbone["fc1"]["bias"])
        self.backbone = nn.Sequential(*blocks, nn.Flatten(), dense, activation)
        head = jax.device_get(params["head"])
        self.head = nn.Linear(*head["kernel"].shape)
        _assign(self.head, head["kernel"].T, head["bias"])
        self.to(DEVICE)

    def forward(self, x: Any) -> Any:
        return self.head(self.backbone(x))


def _assign(layer: Any, weight: np.ndarray, bias: np.ndarray) -> None:
    layer.weight.data.copy_(torch.from_numpy(np.array(weight)))
    layer.bias.data.copy_(torch.from_numpy(np.array(bias)))


def weights(module: Any) -> Any:
    """Copy of the parameters of a module, as one vector."""
    return nn.utils.parameters_to_vector(module.parameters()).detach()


def _load(module: Any, vector: Any) -> None:
    sizes = [parameter.numel() for parameter in module.parameters()]
    for parameter, part in zip(module.parameters(), vector.split(sizes), strict=True):
        parameter.data.copy_(part.view_as(parameter))


def train_clients(network: Network, start: Any, examples: Sequence[Examples], epochs: int, scale: Scale) -> None:
    """Local training alone: every client trains the whole network from the same weights."""
    rates = {"lr": scale.lr, "momentum": scale.momentum, "weight_decay": scale.weight_decay}
    for x, y in examples:
        _load(network, start)
        optimizer = torch.optim.SGD(network.parameters(), **rates)
        for _ in range(epochs):
            for rows in torch.randperm(len(y), device=DEVICE).split(scale.batch_size):
                optimizer.zero_grad()
                functional.cross_entropy(network(x[rows]), y[rows]).backward()
                optimizer.step()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def train_at_once(network: Network, start: Any, examples: Sequence[Examples], epochs: int, scale: Scale) -> None:
    """The same with all clients at once: torch.func's vmap over their parameters."""

    def loss(params: Any, x: Any, y: Any) -> Any:
        return functional.cross_entropy(torch.func.functional_call(network, params, (x,)), y)

    gradients = torch.func.vmap(torch.func.grad(loss))
    _load(network, start)
    number, x, y = len(examples), torch.stack([one.x for one in examples]), torch.stack([one.y for one in examples])
    params = {name: one.detach().repeat(number, *([1] * one.ndim)) for name, one in network.named_parameters()}
    velocities, clients = (
        {name: torch.zeros_like(one) for name, one in params.items()},
        torch.arange(number, device=DEVICE)[:, None],
    )
    for _ in range(epochs):
        for rows in torch.rand(y.shape, device=DEVICE).argsort(1).split(scale.batch_size, 1):
            found = gradients(params, x[clients, rows], y[clients, rows])
            for name, one in params.items():
                velocities[name].mul_(scale.momentum).add_(found[name]).add_(one, alpha=scale.weight_decay)
                one.sub_(velocities[name], alpha=scale.lr)
    _load(network, torch.cat([one[-1].ravel() for one in params.values()]))
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def train_by_graph(network: Network, start: Any, examples: Sequence[Examples], epochs: int, scale: Scale) -> Any:
    """The loop of `train_clients` whose steps replay one CUDA graph, captured now; all clients have whole batches."""
    size = min(scale.batch_size, len(examples[0].y))
    x, y = examples[0].x[:size].clone(), examples[0].y[:size].clone()
    rates = {"lr": scale.lr, "momentum": scale.momentum, "weight_decay": scale.weight_decay}
    optimizer = torch.optim.SGD(network.parameters(), **rates)

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(network(x), y).backward()
        optimizer.step()

    # Some steps first, on a stream of their own, as PyTorch asks for.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def train() -> None:
        for own_x, own_y in examples:
            _load(network, start)
            for state in optimizer.state.values():
                state["momentum_buffer"].zero_()
            for _ in range(epochs):
                for rows in torch.randperm(len(own_y), device=DEVICE).split(size):
                    x.copy_(own_x[rows])
                    y.copy_(own_y[rows])
                    graph.replay()
        torch.cuda.synchronize()

    return train
