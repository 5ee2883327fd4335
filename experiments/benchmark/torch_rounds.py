"""The same work as a plain PyTorch loop, one client after another, for comparison.

Written for this comparison, with the care that this package takes itself: pictures are normalised tensors before the
clock starts, pooling comes before activations, FedPAC's features are computed once for its statistics and
its head's epoch, its matrix of inner products holds all quadratic programmes, which SciPy's nonnegative least squares
solves in milliseconds. Needs PyTorch: requirements-bench.txt.
"""

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import scipy.linalg
import scipy.optimize

from experiments.benchmark.workload import Scale
from pfl_jax.base import Params
from pfl_jax.data.federated import FederatedData, client_data
from pfl_jax.methods.fedpac import NEGLIGIBLE_WEIGHT

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
    """State of FedPAC's server and clients: backbone, a head for each client, centroids [K, d] or None at first."""

    backbone: list[Any]
    heads: list[list[Any]]
    centroids: Any


def clients(data: FederatedData) -> list[tuple[Examples, Examples]]:
    """Training and test examples of every client as tensors."""

    def examples(client: int, split: Any) -> Examples:
        one = jax.device_get(client_data(data, client, split))
        real = np.flatnonzero(one.mask)
        x, y = torch.from_numpy(one.x[real]), torch.from_numpy(one.y[real].astype(np.int64))
        return Examples(x.permute(0, 3, 1, 2).contiguous().to(DEVICE), y.to(DEVICE))

    return [(examples(client, "train"), examples(client, "test")) for client in range(data.num_clients)]


class Network(nn.Module):
    """FedPAC's network for grey pictures; see `pfl_jax.networks.models.fedpac_cnn`."""

    def __init__(self, params: Params):
        """Start from the weights of `fedpac_cnn(...).init`."""
        super().__init__()
        backbone = jax.device_get(params["backbone"])
        blocks = []
        for name, padding in (("conv1", 0), ("conv2", 1)):
            kernel = backbone[name]["kernel"]
            layer = nn.Conv2d(kernel.shape[2], kernel.shape[3], kernel.shape[0], padding=padding)
            _assign(layer, kernel.transpose(3, 2, 0, 1), backbone[name]["bias"])
            blocks += [layer, nn.MaxPool2d(2), nn.LeakyReLU(0.01)]
        kernel = backbone["fc1"]["kernel"]
        # Rows of the dense layer are (row, column, channel) in JAX and (channel, row, column) in PyTorch.
        channels = backbone["conv2"]["bias"].size
        side = round((kernel.shape[0] / channels) ** 0.5)
        rows = kernel.reshape(side, side, channels, -1).transpose(2, 0, 1, 3).reshape(kernel.shape)
        dense = nn.Linear(*kernel.shape)
        _assign(dense, rows.T, backbone["fc1"]["bias"])
        self.backbone = nn.Sequential(*blocks, nn.Flatten(), dense, nn.LeakyReLU(0.01))
        head = jax.device_get(params["head"])
        self.head = nn.Linear(*head["kernel"].shape)
        _assign(self.head, head["kernel"].T, head["bias"])
        self.to(DEVICE)

    def forward(self, x: Any) -> Any:
        return self.head(self.backbone(x))


def _assign(layer: Any, weight: np.ndarray, bias: np.ndarray) -> None:
    layer.weight.data.copy_(torch.from_numpy(np.array(weight)))
    layer.bias.data.copy_(torch.from_numpy(np.array(bias)))


def weights(module: Any) -> list[Any]:
    """Current parameters of a module."""
    return [parameter.detach().clone() for parameter in module.parameters()]


def _load(module: Any, weights: list[Any]) -> None:
    for parameter, value in zip(module.parameters(), weights, strict=True):
        parameter.data.copy_(value)


def _train(parameters: Any, loss: Any, size: int, epochs: int, lr: float, scale: Scale) -> None:
    """SGD on loss(rows) over reshuffled rows of one client."""
    optimizer = torch.optim.SGD(parameters, lr=lr, momentum=scale.momentum, weight_decay=scale.weight_decay)
    for _ in range(epochs):
        for rows in torch.randperm(size, device=DEVICE).split(scale.batch_size):
            optimizer.zero_grad()
            loss(rows).backward()
            optimizer.step()


def train_clients(network: Network, start: list[Any], examples: Sequence[Examples], epochs: int, scale: Scale) -> None:
    """Local training alone: every client trains the whole network from the same weights."""
    for x, y in examples:
        _load(network, start)
        _train(
            network.parameters(),
            lambda rows, x=x, y=y: functional.cross_entropy(network(x[rows]), y[rows]),
            len(y),
            epochs,
            scale.lr,
            scale,
        )
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


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


def head_weights(mu: np.ndarray, variance: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """FedPAC's alpha [M, M] (Eq. 46) by nonnegative least squares.

    For P = U'U the minimiser of ||U x||^2 + (1 - sum x)^2 over x >= 0 is that of x'Px on the simplex, up to its scale.

    Args:
      mu: [M, K, d].
      variance: V [M].
      counts: n [M].
    """
    means = mu.reshape(len(mu), -1).astype(np.float64)
    means -= means.mean(0)
    gram, noise = means @ means.T, np.diag(variance / counts)
    target = np.append(np.zeros(len(mu)), 1.0)
    rows = []
    for i in range(len(mu)):
        bias = gram[i, i] - gram[i][:, None] - gram[i][None] + gram
        factor = scipy.linalg.cholesky(bias + noise + 1e-12 * np.trace(bias) * np.eye(len(mu)))
        row, _ = scipy.optimize.nnls(np.vstack([factor, np.ones(len(mu))]), target)
        row /= row.sum()
        row[row < NEGLIGIBLE_WEIGHT] = 0
        rows.append(row / row.sum())
    return np.stack(rows)


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
        head = weights(self.network.head)
        self.server = Server(weights(self.network.backbone), [head] * len(examples), None)

    def _local(self, client: int) -> tuple[Any, Any, np.ndarray, float, float]:
        """Train the network for one client; return its centroids and counts, mu, V, and accuracy."""
        network, scale, (x, y) = self.network, self.scale, self.examples[client][0]
        _load(network.backbone, self.server.backbone)
        _load(network.head, self.server.heads[client])
        # Once, for the statistics and the head alike.
        features = _features(network, x)
        means, counts = _centroids(features, y, self.num_classes)
        mu = means * (counts / len(y))[:, None]
        variance = (features.square().sum(1).mean() - mu.square().sum()).item()
        _train(
            network.head.parameters(),
            lambda rows: functional.cross_entropy(network.head(features[rows]), y[rows]),
            len(y),
            1,
            scale.head_lr,
            scale,
        )
        targets = None if self.server.centroids is None else self.server.centroids[y]
        network.head.requires_grad_(False)

        def loss(rows: Any) -> Any:
            features = network.backbone(x[rows])
            value = functional.cross_entropy(network.head(features), y[rows])
            return value if targets is None else value + scale.lam * functional.mse_loss(features, targets[rows])

        _train(network.backbone.parameters(), loss, len(y), scale.epochs, scale.lr, scale)
        network.head.requires_grad_(True)
        centroids = _centroids(_features(network, x), y, self.num_classes)
        return centroids, weights(network), mu.cpu().numpy(), variance, _accuracy(network, self.examples[client][1])

    def round(self, cohort: Sequence[int] | None = None) -> tuple[float, float]:
        """One round with both evaluations.

        Args:
          cohort: clients that take part, by default all.

        Returns:
          Mean accuracies over the cohort: received and trained.
        """
        cohort = range(len(self.examples)) if cohort is None else cohort
        results = [self._local(client) for client in cohort]
        counts = np.array([len(self.examples[client][0].y) for client in cohort], np.float64)
        share = torch.from_numpy(counts / counts.sum()).float().to(DEVICE)
        size = len(self.server.backbone)
        stacked = [torch.stack(leaves) for leaves in zip(*(result[1] for result in results), strict=True)]
        backbone = [torch.tensordot(share, leaf, 1) for leaf in stacked[:size]]
        class_counts = torch.stack([result[0][1] for result in results])
        sums = sum(result[0][0] * result[0][1][:, None] for result in results)
        centroids = sums / class_counts.sum(0).clamp(min=1)[:, None]
        rows = head_weights(
            np.stack([result[2] for result in results]), np.array([result[3] for result in results]), counts
        )
        alpha = torch.from_numpy(rows).float().to(DEVICE)
        mixed = [torch.tensordot(alpha, leaf, 1) for leaf in stacked[size:]]
        heads = list(self.server.heads)
        for place, client in enumerate(cohort):
            heads[client] = [leaf[place] for leaf in mixed]
        self.server = Server(backbone, heads, centroids)
        received = [self._received(client) for client in cohort]
        return float(np.mean(received)), float(np.mean([result[4] for result in results]))

    def _received(self, client: int) -> float:
        _load(self.network.backbone, self.server.backbone)
        _load(self.network.head, self.server.heads[client])
        return _accuracy(self.network, self.examples[client][1])
