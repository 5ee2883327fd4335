"""PyTorch modules as models: what is refused, what becomes of parameters, and the command line."""

import contextlib
import json

import chex
import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pages import blocks, executed

from experiments.cli.command import main
from pfl_jax import ClientData, InvalidInput, LocalTraining, Settings, methods, run
from pfl_jax.methods.fedbn import is_normalization
from pfl_jax.networks import from_torch, to_torch
from pfl_jax.primitives.per_example import have_closed_form
from pfl_jax.testing.problems import CLASSES, SHAPE, tiny_federation

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

KEY, X = jax.random.key(0), jax.random.normal(jax.random.key(1), (5, 8))


class Net(nn.Module):
    """A network of which `make` makes others: with more parts, another body, or another end."""

    def __init__(self, parts=None, body=None, end=None):
        super().__init__()
        self.first, self.fc = nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("ones", torch.ones(8))
        self.body, self.end = body or (lambda net, x: torch.relu(net.first(x))), end
        if parts:
            parts(self)

    def forward(self, x):
        return self.end(self, x) if self.end else self.fc(self.body(self, x))


def put(**parts):
    def put_into(net):
        for name, part in parts.items():
            setattr(net, name, part)

    return put_into


def logits(net, x=X):
    with torch.no_grad():
        return net.eval()(torch.tensor(np.asarray(x))).numpy()


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        return -gradient


def set_column(net, x):
    y = net.first(x)
    y[:, 0] = 0
    return y


def change_view(net, x):
    y = net.first(x)
    y.view(-1).relu_()
    return y


def view_without_gradients(net, x):
    y = x * 1
    with torch.no_grad():
        z = y[:, :4]
    y.add_(1)
    return net.first(torch.cat([y[:, 4:], z], 1))


def change_without_gradients(net, x):
    y = net.first(x)
    with torch.no_grad():
        y.clamp_(0, 1)
    return y


LIBRARY = torch.library.Library("mine", "DEF")
LIBRARY.define("square(Tensor x) -> Tensor")
LIBRARY.impl("square", lambda x: x**3, "CompositeExplicitAutograd")
torch.library.register_fake("mine::square", torch.empty_like)


def count_calls(net, x):
    net.ones = net.ones + 1
    return net.first(x) * net.ones


def in_lower_precision(net, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = net.first(x)
    return y.float()


def share_weight(net):
    net.fc = nn.Linear(8, 8)
    net.fc.weight = net.first.weight


def norm(**options):
    return {"parts": put(norm=nn.BatchNorm1d(8, **options)), "body": lambda net, x: net.norm(net.first(x))}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"body": set_column}, r"changes a tensor in its place \(fill_\) and then reads another view"),
        ({"body": change_view}, r"changes a tensor in its place \(relu_\) and then reads another view"),
        ({"body": view_without_gradients}, r"changes a tensor in its place \(add_\) and then reads another view"),
        (
            {"body": change_without_gradients},
            r"changes a tensor without gradients \(clamp_ in torch.no_grad\) that it made with them",
        ),
        (
            {"body": lambda net, x: functional.max_pool1d(x, 2).repeat(1, 2)},
            "max_pool1d takes rows with channels, 3 axes",
        ),
        ({"parts": put(fc=nn.Sequential(nn.MaxPool1d(2), nn.Linear(4, 3)))}, "max_pool1d takes rows with channels"),
        ({"body": lambda net, x: torch.ops.mine.square(x)}, "not supported: mine::square$"),
        (
            {
                "parts": put(table=nn.Embedding(4, 8, scale_grad_by_freq=True)),
                "body": lambda net, x: net.table(x.long()),
            },
            "scale_grad_by_freq is not supported",
        ),
        ({"body": count_calls}, r"changes ones when it is called \(copy_\)"),
        ({"body": in_lower_precision}, "lower precision"),
        ({"body": lambda net, x: functional.dropout(net.first(x), 0.5)}, "draws random numbers when deployed too"),
        ({"body": lambda net, x: Reversed.apply(net.first(x))}, "uses Reversed, an autograd.Function"),
        ({"body": lambda net, x: x if x.sum() > 0 else net.first(x)}, "cannot be read for inputs float32"),
        ({"body": lambda net, x: net.first(x).view(3, 8)}, "cannot be read for inputs float32"),
        *(
            ({"body": lambda net, x, mix=mix: mix(net.first(x))}, "rows of its output from other rows")
            for mix in (
                *(lambda y: y - y.mean(0), lambda y: y - y[:1], lambda y: y - y[-1:], lambda y: y / y.abs().amax()),
                *(lambda y: y.cumsum(0), lambda y: y.flip(0), lambda y: y.roll(1, 0)),
            )
        ),
        (
            {"body": lambda net, x: torch.special.i0(torch.special.erfcx(net.first(x)))},
            "not supported: special_erfcx, special_i0$",
        ),
        ({"parts": share_weight}, "first.weight and fc.weight are the same parameter"),
        ({"parts": lambda net: net.first.register_full_backward_hook(lambda *_: None)}, "first has hooks of gradients"),
        ({"parts": lambda net: net.first.bias.register_hook(lambda g: 2 * g)}, "first.bias has hooks of gradients"),
        ({"parts": put(fc=nn.Sequential(nn.Dropout(0.3), nn.Linear(8, 3)))}, "the head fc has dropout"),
        ({"parts": put(fc=nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3)))}, "the head fc has BatchNorm"),
        (norm(momentum=None), "norm: batch normalization with momentum=None"),
        (norm(track_running_stats=False), "rows of"),
        ({"end": lambda net, x: net.fc(x) + net.fc(net.first(x))}, "fc is called 2 times"),
        ({"end": lambda net, x: net.fc(net.first(x)).log_softmax(1)}, "does more after fc"),
        ({"end": lambda net, x: {"logits": net.fc(x)}}, "gives a dict, not a tensor"),
        ({"parts": put(fc=nn.Linear(8, 4))}, "logits float32"),
        (
            {"parts": put(ids=nn.Buffer(torch.tensor([2**40]))), "body": lambda net, x: x + net.ids},
            "ids of the module has integers beyond 32 bits",
        ),
    ],
)
def test_what_is_refused(parts, message):
    with pytest.raises(InvalidInput, match=message) as error:
        from_torch(Net(**parts), (8,), 3)
    assert "\n" not in str(error.value)


def test_what_is_no_module():
    for module, message in [(Net, "Net is a class"), (3, "3 is neither"), (lambda seed: seed, "gives a int")]:
        with pytest.raises(InvalidInput, match=message):
            from_torch(module, (8,), 3)
    with pytest.raises(InvalidInput, match=r"no part out with parameters.* one of first, fc"):
        from_torch(Net(), (8,), 3, head="out")


def reshape_in_place(net, x):
    y = net.first(x).view(-1, 2, 4)
    y.relu_()
    return y.flatten(1)


def test_counts_change_without_gradients():
    from_torch(Net(put(norm=nn.BatchNorm1d(8)), torch.no_grad()(lambda net, x: net.norm(x))), (8,), 3)


class OwnNorm(nn.Module):
    """A normalization that has a parameter "scale" besides "weight"."""

    def __init__(self):
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.full((8,), 2.0)), nn.Parameter(torch.full((8,), 3.0))

    def forward(self, x):
        return x * self.weight + self.scale


def change_twice(net, x):
    y = net.first(x)
    z = y.relu_()
    z.add_(1)
    return y * z


def change_own_without_gradients(net, x):
    with torch.no_grad():
        y = x * 2
    z = net.first(x)
    with torch.no_grad():
        y.add_(1)
    return y * z


def read_table(net, x):
    places = (x > 0).long()
    return net.first(x) * (net.table[places, 0] + functional.embedding(places, net.table).squeeze(-1))


@pytest.mark.parametrize(
    "parts",
    [
        {"body": reshape_in_place},
        {"body": change_own_without_gradients},
        {"parts": put(table=nn.Buffer(torch.tensor([[1.0], [2.0]]))), "body": read_table},
        {"body": change_twice},
        {"parts": put(norm=OwnNorm()), "body": lambda net, x: net.norm(net.first(x))},
        {"parts": put(second=nn.Linear(8, 8)), "body": lambda net, x: net.second(net.first(x).relu_()) + x},
        {"parts": lambda net: put(second=net.first)(net), "body": lambda net, x: net.second(net.first(x))},
        {"parts": lambda net: nn.utils.parametrizations.weight_norm(net.first)},
        {"parts": lambda net: net.first.register_forward_hook(lambda part, given, y: y + 1)},
        {"body": lambda net, x: net.first(x) * net.ones[:1] + torch.arange(8)},
    ],
)
def test_what_is_not_refused_is_right(parts):
    net = Net(**parts)
    model = from_torch(net, (8,), 3)
    assert model.batch_features is None
    params = model.init(KEY)
    np.testing.assert_allclose(model.apply(params, X), logits(net), rtol=1e-5, atol=1e-6)
    moved = jax.tree.map(lambda leaf: leaf + 0.1, params)
    back = to_torch(moved, Net(**parts))
    np.testing.assert_allclose(model.apply(moved, X), logits(back), rtol=1e-5, atol=1e-6)


def test_a_function_gives_each_seed_its_own_parameters():
    model = from_torch(lambda seed: Net(), (8,), 3)
    first, again, other = (jax.jit(model.init)(jax.random.key(seed)) for seed in (0, 0, 1))
    chex.assert_trees_all_equal(first, again)
    assert not np.allclose(first["head"]["kernel"], other["head"]["kernel"])
    both = jax.vmap(model.init)(jax.random.split(KEY, 2))
    chex.assert_trees_all_equal(jax.tree.map(lambda leaf: leaf[1], both), model.init(jax.random.split(KEY, 2)[1]))
    net = Net()
    model = from_torch(net, (8,), 3)
    for seed in (0, 1):
        np.testing.assert_array_equal(model.init(jax.random.key(seed))["head"]["kernel"], net.fc.weight.detach().T)
    # PyTorch's own generator goes on as if nothing had been made.
    torch.manual_seed(5)
    wanted = torch.rand(())
    torch.manual_seed(5)
    from_torch(lambda seed: Net(), (8,), 3).init(KEY)
    assert torch.rand(()) == wanted


def test_frozen_parameters():
    def freeze(net):
        net.first.requires_grad_(False)

    net = Net(freeze)
    model = from_torch(net, (8,), 3)
    assert jax.tree.map(jnp.shape, model.init(KEY)) == {"backbone": {}, "head": {"bias": (3,), "kernel": (8, 3)}}
    assert model.frozen.values.keys() == {"first.weight", "first.bias"}
    np.testing.assert_allclose(model.apply(model.init(KEY), X), logits(net), rtol=1e-5, atol=1e-6)


class Normalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, momentum=0.3)
        self.groups, self.layer = nn.GroupNorm(2, 4), nn.LayerNorm(16)
        self.drop, self.hidden, self.fc = nn.Dropout(0.2), nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = functional.max_pool2d(torch.relu_(self.groups(self.norm(self.conv(x)))), 2)
        return self.fc(torch.relu(self.hidden(self.drop(self.layer(x.flatten(1))))))


class NormLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))

    def forward(self, x):
        return functional.normalize(x) @ self.weight


def test_a_matrix_is_no_scale_and_a_vector_of_zeros_has_a_gradient():
    net = Net(put(norm=NormLinear()), lambda net, x: net.norm(x))
    model = from_torch(net, (8,), 3)
    params = model.init(KEY)
    assert "weight" in params["backbone"]["norm"]
    x = X.at[0].set(0)
    gradient = jax.grad(lambda x: model.apply(params, x).sum())(x)
    tensor = torch.tensor(np.asarray(x), requires_grad=True)
    net(tensor).sum().backward()
    np.testing.assert_allclose(gradient, tensor.grad, rtol=1e-4, atol=1e-5)


def drawn_with_probabilities(net, x):
    return x * torch.bernoulli(torch.full_like(x, 0.9)) if net.training else x


def test_draws_have_their_probabilities():
    model, x = from_torch(Net(body=drawn_with_probabilities), (8,), 3), jnp.ones((500, 8))
    data = ClientData(x, None, jnp.ones(500, bool))
    features, _ = model.training_features(model.init(KEY)["backbone"], data, KEY)
    assert 0.88 < float(features.mean()) < 0.92


def test_training_with_normalization_and_dropout():
    net, x = Normalized(), jax.random.normal(KEY, (5, 6, 6, 2))
    model = from_torch(net, (6, 6, 2), 3)
    params = model.init(KEY)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    own = {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, is_own in zip(paths, is_normalization(params), strict=True)
        if is_own
    }
    assert own == {
        *(f"backbone/{part}/{name}" for part in ("norm", "groups", "layer") for name in ("scale", "bias")),
        *(f"backbone/batch_stats/norm/running_{name}" for name in ("mean", "var")),
    }
    mask, keys = jnp.arange(5) < 4, jax.random.split(KEY, 2)
    pads = x.at[4].set(9)
    features, statistics = model.training_features(params["backbone"], ClientData(pads, None, mask), keys[0])
    other, _ = model.training_features(params["backbone"], ClientData(pads, None, mask), keys[1])
    assert not np.allclose(features, other)
    # Without dropout, PyTorch's own, of the real examples alone.
    net.drop.p = 0.0
    model = from_torch(net, (6, 6, 2), 3)
    features, statistics = model.training_features(params["backbone"], ClientData(pads, None, mask), keys[0])
    wanted = net.train()(torch.tensor(np.asarray(x[:4])).permute(0, 3, 1, 2)).detach().numpy()
    np.testing.assert_allclose(model.classify(params["head"], features)[:4], wanted, rtol=1e-4, atol=1e-5)
    for name in ("running_mean", "running_var"):
        np.testing.assert_allclose(statistics["norm"][name], getattr(net.norm, name), rtol=1e-5)
    # And the way back, with the statistics.
    moved = {**params, "backbone": {**params["backbone"], "batch_stats": statistics}}
    back = to_torch(moved, Normalized())
    there = back.eval()(torch.tensor(np.asarray(x)).permute(0, 3, 1, 2)).detach().numpy()
    np.testing.assert_allclose(model.apply(moved, x), there, rtol=1e-4, atol=1e-5)


def test_parameters_of_another_module_are_refused():
    params = from_torch(Net(), (8,), 3).init(KEY)
    with pytest.raises(InvalidInput, match="the module has no backbone/first/bias"):
        to_torch(params, nn.ModuleDict({"fc": nn.Linear(8, 3)}))
    with pytest.raises(InvalidInput, match="the model has no backbone/second/bias"):
        to_torch(params, Net(put(second=nn.Linear(2, 2))))
    with pytest.raises(InvalidInput, match=r"fc.weight of the module is \[4, 8\], and the model's \[3, 8\]"):
        to_torch(params, Net(put(fc=nn.Linear(8, 4))))


def test_convolutions_are_the_fast_ones():
    layers = [nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(16, 3)]
    model, x = from_torch(nn.Sequential(*layers), (8, 8, 1), 3, head="4"), jnp.ones((2, 8, 8, 1))
    gradient = jax.grad(lambda params: model.apply(params, x).sum())
    text = str(jax.make_jaxpr(gradient)(model.init(KEY)))
    assert text.count("conv_general_dilated") == 0
    assert text.count("pfl_jax_convolve") >= 2


def test_a_model_of_a_module_trains_and_can_be_pickled():
    net = nn.Sequential(nn.Flatten(), nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, CLASSES))
    model = cloudpickle.loads(cloudpickle.dumps(from_torch(net, SHAPE, CLASSES, head="3")))
    method = methods.fedper(model, LocalTraining(lr=0.1, batch_size=8, epochs=2))
    *_, last = run(method, tiny_federation(), Settings(rounds=8), KEY)
    assert last.received["accuracy"].mean() > 0.7


OWN = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self, num_classes=10):
        super().__init__()
        self.flat, self.hidden, self.relu = nn.Flatten(), nn.Linear(64, 16), nn.ReLU()
        self.{head} = nn.Linear(16, num_classes)

def net(input_shape, num_classes):
    return Net(num_classes)

SHARED = Net()

def shared(input_shape, num_classes):
    return SHARED
"""
SMALL = ["--rounds", "1", "--num-clients", "3", "--train-size", "20", "--test-size", "10", "--no-compilation-cache"]


@pytest.mark.parametrize(("name", "head"), [("Net", None), ("net", "out"), ("shared", None)])
def test_a_command_with_a_module(name, head, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_net.py").write_text(OWN.replace("{head}", head or "fc"))
    named = ["--head", head] if head else []
    words = ["--model", f"my_net.py:{name}", *named, *SMALL, "--out", "run"]
    is_one = pytest.warns(UserWarning, match="my_net.py:shared makes only one module: all seeds start from it")
    with is_one if name == "shared" else contextlib.nullcontext():
        assert main("digits", words) == 0
    assert json.loads((tmp_path / "run/config.json").read_text())["options"]["model"] == f"my_net.py:{name}"


def test_the_page_runs_as_it_stands(tmp_path, monkeypatch):
    """With a network in a file, a federation, and the way back into PyTorch."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    module, program = blocks("docs/torch.md")
    (tmp_path / "my_net.py").write_text(module)
    names = executed(program)
    wanted = names["model"].apply(names["params"], names["x"])
    np.testing.assert_allclose(names["logits"].detach(), wanted, rtol=1e-4, atol=1e-5)


def test_squared_norms_of_single_gradients_come_from_one_pass():
    """As for the networks of this library: fedas and differential privacy are as fast."""
    layers = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(36, 3)]
    model = from_torch(nn.Sequential(*layers), (8, 8, 1), 3, head="5")
    batch = ClientData(jnp.ones((5, 8, 8, 1)), jnp.zeros(5, jnp.int32), jnp.ones(5, bool))

    def loss(params, batch):
        return -jnp.sum(jax.nn.log_softmax(model.apply(params, batch.x))[:, 0])

    assert have_closed_form(loss, model.init(KEY), batch, 5)
