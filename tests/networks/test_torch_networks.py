"""Whole networks of PyTorch: values, gradients and training as there, whole rounds too, and the way back."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pfl_jax import ClientData, LocalTraining, Settings, files, methods, run
from pfl_jax.data.federated import client_data
from pfl_jax.networks import from_torch, to_torch
from pfl_jax.primitives.losses import supervised_loss
from pfl_jax.testing.problems import tiny_federation

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

pytestmark = pytest.mark.slow


class Cnn(nn.Module):
    """As in PFLlib."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Sequential(nn.Conv2d(1, 8, 5), nn.ReLU(inplace=True), nn.MaxPool2d((2, 2)))
        self.conv2 = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(inplace=True), nn.MaxPool2d((2, 2)))
        self.fc1 = nn.Sequential(nn.Linear(144, 32), nn.ReLU(inplace=True))
        self.fc = nn.Linear(32, 10)

    def forward(self, x):
        return self.fc(self.fc1(torch.flatten(self.conv2(self.conv1(x)), 1)))


class Block(nn.Module):
    def __init__(self, inputs, width, stride, norm):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False), norm(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), norm(width)
        self.relu, self.down = nn.ReLU(inplace=True), None
        if stride > 1 or inputs != width:
            self.down = nn.Sequential(nn.Conv2d(inputs, width, 1, stride, bias=False), norm(width))

    def forward(self, x):
        same = x if self.down is None else self.down(x)
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        y += same
        return self.relu(y)


class ResNet(nn.Module):
    """ResNet-18 with fewer channels."""

    def __init__(self, norm=nn.BatchNorm2d, width=4):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 7, 2, 3, bias=False), norm(width), nn.ReLU(inplace=True))
        self.pool, layers, inputs = nn.MaxPool2d(3, 2, 1), [], width
        for stage in range(4):
            for block in range(2):
                layers.append(Block(inputs, width * 2**stage, 2 if stage and not block else 1, norm))
                inputs = width * 2**stage
        self.layers, self.average, self.fc = nn.Sequential(*layers), nn.AdaptiveAvgPool2d(1), nn.Linear(inputs, 10)

    def forward(self, x):
        return self.fc(self.average(self.layers(self.pool(self.stem(x)))).flatten(1))


class MobileNet(nn.Module):
    """Inverted residuals with depthwise convolutions, squeeze-and-excitation and hard activations."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.Hardswish())
        self.wide = nn.Sequential(nn.Conv2d(8, 24, 1, bias=False), nn.BatchNorm2d(24), nn.ReLU6(inplace=True))
        self.depthwise = nn.Sequential(nn.Conv2d(24, 24, 5, 1, 2, groups=24), nn.BatchNorm2d(24), nn.Hardswish())
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(24, 6, 1), nn.ReLU(), nn.Conv2d(6, 24, 1))
        self.narrow = nn.Sequential(nn.Conv2d(24, 8, 1, bias=False), nn.BatchNorm2d(8))
        self.drop, self.fc = nn.Dropout(0.2), nn.Linear(8, 10)

    def forward(self, x):
        x = self.stem(x)
        y = self.depthwise(self.wide(x))
        y = y * functional.hardsigmoid(self.squeeze(y))
        return self.fc(self.drop((x + self.narrow(y)).mean([2, 3])))


class Vit(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token, self.places = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.randn(1, 17, width))
        layer = nn.TransformerEncoderLayer(width, 2, 24, 0.1, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(width), enable_nested_tensor=False)
        self.fc = nn.Linear(width, 10)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        return self.fc(self.encoder(x)[:, 0])


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.layers = kind(5, 8, num_layers=2, batch_first=True, dropout=0.2, **options)
        self.fc = nn.Linear(16 if options else 8, 10)

    def forward(self, x):
        return self.fc(self.layers(x)[0][:, -1])


class Text(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.tokens, self.places = nn.Embedding(20, width, padding_idx=0), nn.Embedding(12, width)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(width, 2, 24, batch_first=True), 1)
        self.fc = nn.Linear(width, 10)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        x, real = self.encoder(x, src_key_padding_mask=tokens == 0), (tokens != 0)[..., None]
        return self.fc((x * real).sum(1) / real.sum(1).clamp(min=1))


IMAGE, STEPS = (16, 16, 3), (7, 5)
NETWORKS = {
    "cnn": (Cnn, (20, 20, 1)),
    "resnet18, BatchNorm": (ResNet, (32, 32, 3)),
    "resnet18, GroupNorm": (lambda: ResNet(lambda width: nn.GroupNorm(2, width)), (32, 32, 3)),
    "mobilenet": (MobileNet, IMAGE),
    "vit": (Vit, IMAGE),
    "lstm": (lambda: Recurrent(nn.LSTM), STEPS),
    "gru, both ways": (lambda: Recurrent(nn.GRU, bidirectional=True), STEPS),
    "transformer": (Text, (12,)),
}
ROWS = 6


def without_dropout(net):
    for part in net.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if isinstance(part, nn.RNNBase | nn.MultiheadAttention):
            part.dropout = 0.0
    return net


def made(name):
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    numbers = np.random.default_rng(0)
    tokens = len(shape) == 1
    x = numbers.integers(1, 20, (ROWS, *shape)) if tokens else numbers.normal(size=(ROWS, *shape))
    x = x.astype("int32" if tokens else "float32")
    if tokens:
        x[:, 9:] = 0
    given = torch.tensor(x.astype("int64") if tokens else x)
    return make(), x, given.permute(0, 3, 1, 2) if x.ndim == 4 else given


def assert_close(found, wanted, tolerance):
    wanted = wanted.detach().numpy() if isinstance(wanted, torch.Tensor) else np.asarray(wanted)
    assert np.abs(np.asarray(found) - wanted).max() <= tolerance * max(1e-2, np.abs(wanted).max())


@pytest.mark.parametrize("training", [False, True], ids=["deployed", "training"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network(name, training):
    """Outputs, gradients and running statistics are PyTorch's, the way back too, and with a client beside it."""
    net, x, given = made(name)
    kind = {"input_dtype": x.dtype}
    model = from_torch(without_dropout(net), x.shape[1:], 10, **kind)
    params, y = model.init(jax.random.key(0)), np.arange(ROWS) % 10
    wanted = net.train(training)(given)
    functional.cross_entropy(wanted, torch.tensor(y)).backward()
    batch = ClientData(jnp.asarray(x), jnp.asarray(y, jnp.int32), jnp.ones(ROWS, bool))

    def loss(params):
        if training:
            return supervised_loss(model)(params, batch, jax.random.key(0))
        found = jax.nn.log_softmax(model.apply(params, x))
        return -jnp.mean(found[jnp.arange(ROWS), y]), ()

    gradient, statistics = jax.jit(jax.grad(loss, has_aux=True))(params)
    if not training:
        assert_close(jax.jit(model.apply)(params, x), wanted, 1e-5)
    trained = {**gradient, "backbone": dict(gradient["backbone"])}
    if "batch_stats" in params["backbone"]:
        trained["backbone"]["batch_stats"] = params["backbone"]["batch_stats"]
    holder = to_torch(trained, copy.deepcopy(net))
    for parameter, there in zip(net.parameters(), holder.parameters(), strict=True):
        wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert_close(there.detach(), wanted, 1e-4)
    buffers = dict(net.named_buffers())
    if training and "batch_stats" in params["backbone"]:
        flat = jax.tree_util.tree_leaves_with_path(statistics)
        for path, value in flat:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            assert_close(value, buffers[name], 1e-5)
    moved = jax.tree.map(lambda leaf: 1.1 * leaf, params)
    back = to_torch(moved, copy.deepcopy(net)).eval()
    assert_close(jax.jit(model.apply)(moved, x), back(given), 1e-5)
    many = jax.tree.map(lambda *leaves: jnp.stack(leaves), params, moved)
    both = jax.jit(jax.vmap(model.apply, (0, None)))(many, x)
    assert_close(both[1], back(given), 1e-5)


class Small(nn.Module):
    """For the inputs of `tiny_federation`, with all that methods treat apart."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, (2, 3), padding=(0, 1)), nn.BatchNorm2d(4)
        self.hidden, self.fc = nn.Linear(12, 8), nn.Linear(8, 3)

    def features(self, x):
        return torch.relu(self.hidden(torch.relu(self.norm(self.conv(x))).flatten(1)))

    def forward(self, x):
        return self.fc(self.features(x))


RECIPE = {"lr": 0.05, "momentum": 0.5, "weight_decay": 5e-4}
OPTIONS = {
    "fedper": {},
    "fedbn": {},
    "ditto": {"lam": 0.7, "personal_epochs": 2},
    "fedas": {"align_lr": 0.1, "align_batch_size": 64, "align_epochs": 2},
    "fedpac": {"lam": 0.7, "head_lr": 0.1, "head_epochs": 2},
}


class Loop:
    """The same methods as loops in PyTorch: every batch is a whole client.

    Attributes:
      clients: x, y and the states that clients keep.
      server: state of the module on the server.
    """

    def __init__(self, net, federation):
        self.net, self.server, self.clients = net, copy.deepcopy(net.state_dict()), []
        self.centroids, self.aligns = torch.full((3, 8), torch.nan), False
        for i in range(federation.num_clients):
            data = client_data(federation, i, "train")
            size = int(data.mask.sum())
            x = torch.tensor(np.asarray(data.x, np.float32)[:size]).permute(0, 3, 1, 2)
            y = torch.tensor(np.asarray(data.y)[:size].astype("int64"))
            self.clients.append((x, y, copy.deepcopy(self.server)))

    def load(self, *states):
        """Module in training with the entries of several states, the last ones first."""
        net = copy.deepcopy(self.net)
        net.load_state_dict({key: value for state in states for key, value in state.items()})
        return net.train()

    @staticmethod
    def descend(parameters, loss, epochs=3, **changes):
        optimizer = torch.optim.SGD(parameters, **RECIPE | changes)
        for _ in range(epochs):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()

    def collect(self, trained, weights):
        """Mean of the trained states, which is the server's next one, and the states that clients keep."""
        shares = np.array(weights, float) / sum(weights)
        self.server = {
            key: sum(float(share) * one[key] for share, one in zip(shares, trained, strict=True)) for key in self.server
        }

    def keep(self, states):
        self.clients = [(x, y, copy.deepcopy(own)) for (x, y, _), own in zip(self.clients, states, strict=True)]

    def sizes(self):
        return [len(y) for _, y, _ in self.clients]

    def partial(self, part, info):
        """FedPer and FedBN, whose clients keep a part of the module."""
        trained = []
        for x, y, own in self.clients:
            net = self.load(self.server, {key: own[key] for key in own if key.startswith(part)})
            self.descend(net.parameters(), lambda net=net, x=x, y=y: functional.cross_entropy(net(x), y))
            trained.append(net.state_dict())
        self.collect(trained, self.sizes())
        self.keep(trained)

    def ditto(self, info):
        received, trained, personal = self.load(self.server), [], []
        for x, y, own in self.clients:
            net = self.load(own)

            def loss(net=net, x=x, y=y):
                pairs = zip(net.parameters(), received.parameters(), strict=True)
                distance = sum(((mine - there.detach()) ** 2).sum() for mine, there in pairs)
                return functional.cross_entropy(net(x), y) + 0.7 / 2 * distance

            self.descend(net.parameters(), loss, epochs=2)
            personal.append(net.state_dict())
            net = self.load(self.server)
            self.descend(net.parameters(), lambda net=net, x=x, y=y: functional.cross_entropy(net(x), y))
            trained.append(net.state_dict())
        self.collect(trained, self.sizes())
        self.keep(personal)

    def aligned(self, x, own):
        """FedAS's received module, aligned with the client's own embeddings; the head is the client's."""
        net = self.load(self.server, {key: own[key] for key in own if key.startswith("fc.")})
        if self.aligns:
            targets, body = self.load(own).eval().features(x).detach(), [*net.conv.parameters()]
            body += [*net.norm.parameters(), *net.hidden.parameters()]
            plain = {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0}
            self.descend(body, lambda: functional.mse_loss(net.features(x), targets), epochs=2, **plain)
        return net

    def fedas(self, info):
        trained, traces = [], []
        for x, y, own in self.clients:
            net = self.aligned(x, own)
            self.descend(net.parameters(), lambda net=net, x=x, y=y: functional.cross_entropy(net(x), y))
            trained.append(copy.deepcopy(net.state_dict()))
            net.eval()
            squares = 0.0
            for row in range(len(y)):
                loss = functional.cross_entropy(net(x[row : row + 1]), y[row : row + 1])
                gradients = torch.autograd.grad(loss, list(net.parameters()))
                squares += sum(float((one**2).sum()) for one in gradients)
            traces.append(squares / len(y))
        self.collect(trained, traces)
        self.keep(trained)
        self.aligns = True

    def fedpac(self, info):
        """The weights of the heads are the run's, since they are a quadratic program's."""
        trained, heads, sums, counts = [], [], torch.zeros(3, 8), torch.zeros(3)
        for x, y, own in self.clients:
            net = self.load(self.server, {key: own[key] for key in own if key.startswith("fc.")})
            features = net.eval().features(x).detach()
            means = torch.stack([features[y == label].mean(0) for label in range(3)])
            targets = torch.where(torch.isnan(self.centroids), means, self.centroids)[y]

            def risk_of_head(head=net.fc, features=features, y=y):
                return functional.cross_entropy(head(features), y)

            self.descend(net.fc.parameters(), risk_of_head, 2, lr=0.1)
            heads.append(copy.deepcopy(net.fc.state_dict()))
            strength, net = (0.0 if torch.isnan(self.centroids).all() else 0.7), net.train()

            def loss(net=net, x=x, y=y, targets=targets, strength=strength):
                features = net.features(x)
                risk = functional.cross_entropy(net.fc(features), y)
                return risk + (strength * functional.mse_loss(features, targets) if strength else 0.0)

            body = [*net.conv.parameters(), *net.norm.parameters(), *net.hidden.parameters()]
            self.descend(body, loss)
            trained.append(copy.deepcopy(net.state_dict()))
            sums.index_add_(0, y, net.eval().features(x).detach())
            counts += torch.bincount(y, minlength=3)
        self.collect(trained, self.sizes())
        self.centroids = torch.where(counts[:, None] > 0, sums / counts[:, None], self.centroids)
        weights = torch.tensor(np.asarray(info["head_weights"]))
        mixed = {key: torch.stack([head[key] for head in heads]) for key in heads[0]}
        self.keep(
            [
                {f"fc.{key}": torch.tensordot(weights[i], value, 1) for key, value in mixed.items()}
                for i in range(len(heads))
            ]
        )

    def round(self, name, info):
        parts = {"fedper": "fc.", "fedbn": "norm."}
        if name in parts:
            self.partial(parts[name], info)
        else:
            getattr(self, name)(info)

    def deployed(self, name, client):
        x, _, own = self.clients[client]
        if name == "ditto":
            return own
        if name == "fedas":
            return self.aligned(x, own).state_dict()
        part = "norm." if name == "fedbn" else "fc."
        return self.server | {key: own[key] for key in own if key.startswith(part)}


@pytest.mark.parametrize("name", OPTIONS)
def test_ten_rounds_are_those_of_a_loop_in_pytorch(name):
    """The same batches and initial weights: equal to 1e-4 of the change."""
    torch.manual_seed(0)
    net, federation = Small(), tiny_federation()
    loop, model = Loop(net, federation), from_torch(net, (2, 3, 1), 3)
    training = LocalTraining(batch_size=64, epochs=3, shuffle=False, **RECIPE)
    method = getattr(methods, name)(model, training, **OPTIONS[name])
    for last in run(method, federation, Settings(rounds=10), jax.random.key(0)):
        loop.round(name, last.info)
    for i in range(federation.num_clients):
        found = to_torch(files.client_params(method, federation, last.state, client=i), copy.deepcopy(net)).state_dict()
        for key, wanted in loop.deployed(name, i).items():
            if not key.endswith("num_batches_tracked"):
                change = float((wanted - net.state_dict()[key]).abs().max())
                np.testing.assert_allclose(found[key], wanted, rtol=0, atol=1e-4 * change + 1e-6, err_msg=key)


@pytest.mark.parametrize("name", ["fedper", "fedpac", "fedas", "fedbn", "ditto"])
def test_methods_train_a_module(name):
    model = from_torch(lambda seed: Small(), (2, 3, 1), 3)
    method = getattr(methods, name)(model, LocalTraining(lr=0.1, batch_size=8, epochs=2))
    *_, last = run(method, tiny_federation(), Settings(rounds=10), jax.random.key(0))
    assert last.trained["accuracy"].mean() > 0.7
