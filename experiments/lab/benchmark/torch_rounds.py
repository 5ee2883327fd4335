"""The same work as a plain PyTorch loop, one client after another, for comparison.

Written for this comparison, with the care that this package takes itself: pictures are normalized tensors before the
clock starts, pooling comes before activations, FedPAC's features are computed once for its statistics and its head's
epoch; the quadratic programs of the heads are solved by this package. Needs PyTorch: requirements-bench.txt.
"""

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lab.benchmark.workload import Scale
from pfl_jax.base import Params
from pfl_jax.data.federated import FederatedData, client_data
from pfl_jax.primitives.head_combination import head_weights

# By name, so that the type checker asks for nothing that may not be installed.
torch: Any = importlib.import_module("torch")
nn: Any = importlib.import_module("torch.nn")
functional: Any = importlib.import_module("torch.nn.functional")

FEATURE_BATCH = 200
"""Examples whose features are computed at once, as in the JAX rounds."""


# The GPU, if both sides can have it.
DEVICE: Any = torch.device("cuda" if jax.default_backend() == "gpu" and torch.cuda.is_available() else "cpu")


class Examples(NamedTuple):
    """Examples of one client in memory: x [n, C, H, W] and y [n]."""

    x: Any
    y: Any


class Server(NamedTuple):
    """State of FedPAC's server and clients: backbone [P], a head for each client [N, H], centroids [K, d] or None."""

    backbone: Any
    heads: Any
    centroids: Any


def clients(data: FederatedData) -> list[tuple[Examples, Examples]]:
    """Training and test examples of every client as tensors."""

    def examples(client: int, split: Any) -> Examples:
        one = jax.device_get(client_data(data, client, split))
        real = np.flatnonzero(one.mask)
        x, y = torch.from_numpy(one.x[real]), torch.from_numpy(one.y[real].astype(np.int64))
        return Examples(x.permute(0, 3, 1, 2).contiguous().to(DEVICE), y.to(DEVICE))

    return [(examples(client, "train"), examples(client, "test")) for client in range(data.num_clients)]


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


def _train(parameters: Any, loss: Any, size: int, epochs: int, lr: float, scale: Scale) -> None:
    """SGD on loss(rows) over reshuffled rows of one client."""
    optimizer = torch.optim.SGD(parameters, lr=lr, momentum=scale.momentum, weight_decay=scale.weight_decay)
    for _ in range(epochs):
        for rows in torch.randperm(size, device=DEVICE).split(scale.batch_size):
            optimizer.zero_grad()
            loss(rows).backward()
            optimizer.step()


def train_clients(network: Network, start: Any, examples: Sequence[Examples], epochs: int, scale: Scale) -> None:
    """Local training alone: every client trains the whole network from the same weights."""
    for x, y in examples:
        _load(network, start)

        def loss(rows: Any, x: Any = x, y: Any = y) -> Any:
            return functional.cross_entropy(network(x[rows]), y[rows])

        _train(network.parameters(), loss, len(y), epochs, scale.lr, scale)
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


def _features(network: Network, x: Any) -> Any:
    with torch.no_grad():
        return torch.cat([network.backbone(part) for part in x.split(FEATURE_BATCH)])


def _accuracy(network: Network, examples: Examples) -> float:
    with torch.no_grad():
        predicted = network.head(_features(network, examples.x)).argmax(1)
    return (predicted == examples.y).float().mean().item()


def _centroids(features: Any, y: Any, num_classes: int) -> tuple[Any, Any]:
    """Class means [K, d], zero for absent classes, and counts [K]."""
    members = functional.one_hot(y, num_classes).float()
    counts = members.sum(0)
    return members.T @ features / counts.clamp(min=1)[:, None], counts


class FedPAC:
    """Rounds of FedPAC over all clients, one after another.

    Args:
      params: initial weights, JAX's.
      examples: (training, test) of each client.
      num_classes: K.
      scale: batch, epochs and rates.
    """

    def __init__(self, params: Params, examples: Sequence[tuple[Examples, Examples]], num_classes: int, scale: Scale):
        self.network, self.examples = Network(params), examples
        self.num_classes, self.scale = num_classes, scale
        heads = weights(self.network.head).repeat(len(examples), 1)
        self.server = Server(weights(self.network.backbone), heads, None)

    def _local(self, client: int) -> tuple[Any, Any, np.ndarray, float, float]:
        """Train the network for one client; return its centroids and counts, mu, V, and accuracy."""
        network, scale, (x, y) = self.network, self.scale, self.examples[client][0]
        self._deploy(client)
        # Once, for the statistics and the head alike.
        features = _features(network, x)
        means, counts = _centroids(features, y, self.num_classes)
        mu = means * (counts / len(y))[:, None]
        variance = (features.square().sum(1).mean() - mu.square().sum()).item()

        def head_loss(rows: Any) -> Any:
            return functional.cross_entropy(network.head(features[rows]), y[rows])

        _train(network.head.parameters(), head_loss, len(y), 1, scale.head_lr, scale)
        targets = None if self.server.centroids is None else self.server.centroids[y]
        network.head.requires_grad_(False)

        def loss(rows: Any) -> Any:
            features = network.backbone(x[rows])
            value = functional.cross_entropy(network.head(features), y[rows])
            return value if targets is None else value + scale.lam * functional.mse_loss(features, targets[rows])

        _train(network.backbone.parameters(), loss, len(y), scale.epochs, scale.lr, scale)
        network.head.requires_grad_(True)
        centroids = _centroids(_features(network, x), y, self.num_classes)
        trained = weights(network.backbone), weights(network.head)
        return centroids, trained, mu.cpu().numpy(), variance, _accuracy(network, self.examples[client][1])

    def _deploy(self, client: int) -> None:
        _load(self.network.backbone, self.server.backbone)
        _load(self.network.head, self.server.heads[client])

    def round(self, cohort: Sequence[int] | None = None) -> tuple[float, float]:
        """One round of a cohort, by default of all: mean accuracies over it, received and trained."""
        cohort = range(len(self.examples)) if cohort is None else cohort
        centroids, trained, mu, variance, accuracies = zip(*map(self._local, cohort), strict=True)
        counts = np.array([len(self.examples[client][0].y) for client in cohort], np.float64)
        alpha = np.array(head_weights(jnp.stack(mu), jnp.array(variance), jnp.asarray(counts)))
        share, alpha = (torch.from_numpy(rows).float().to(DEVICE) for rows in (counts / counts.sum(), alpha))
        backbones, heads = (torch.stack(vectors) for vectors in zip(*trained, strict=True))
        sums = sum(means * number[:, None] for means, number in centroids)
        members = torch.stack([number for _, number in centroids]).sum(0).clamp(min=1)
        every = self.server.heads.clone()
        every[list(cohort)] = alpha @ heads
        self.server = Server(share @ backbones, every, sums / members[:, None])
        received = []
        for client in cohort:
            self._deploy(client)
            received.append(_accuracy(self.network, self.examples[client][1]))
        return float(np.mean(received)), float(np.mean(accuracies))
