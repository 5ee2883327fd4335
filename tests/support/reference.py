"""The tiny model of problems.py in float64 NumPy, with gradients by finite differences: slow and obvious."""

import numpy as np
from scipy import special
from scipy.optimize import nnls

from pfl_jax.data import client_data


def to_numpy(params):
    """The model's parameters as one flat dict of float64 arrays."""
    # A model, or a server's state that holds one.
    parts = params._asdict() if hasattr(params, "_asdict") else params
    return {
        f"{part}/{name}": np.float64(parts[part][name]) for part in ("backbone", "head") for name in ("kernel", "bias")
    }


def features(w, x):
    return np.tanh(x.reshape(len(x), -1) @ w["backbone/kernel"] + w["backbone/bias"])


def logits(w, x):
    return features(w, x) @ w["head/kernel"] + w["head/bias"]


def log_softmax(scores):
    scores = scores - scores.max(1, keepdims=True)
    return scores - np.log(np.exp(scores).sum(1, keepdims=True))


def cross_entropy(scores, y):
    """Mean over the rows of scores."""
    return -np.mean(log_softmax(scores)[np.arange(len(y)), y])


def flat(w):
    """All entries of a flat dict in one vector, arrays by name."""
    return np.concatenate([np.ravel(w[name]) for name in sorted(w)])


def model_of(vector):
    """The tiny model whose `flat` this is."""
    shapes = {"backbone/bias": (4,), "backbone/kernel": (6, 4), "head/bias": (3,), "head/kernel": (4, 3)}
    parts = np.split(vector, np.cumsum([np.prod(shape) for shape in shapes.values()])[:-1])
    return {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def squared_distance(w, v):
    return sum(((w[name] - v[name]) ** 2).sum() for name in w)


def part(w, name):
    """The entries of a flat dict whose names begin so."""
    return {key: value for key, value in w.items() if key.startswith(name)}


def risk(w, x, y):
    """Mean cross entropy of the model."""
    return cross_entropy(logits(w, x), y)


def loss(w, data, client):
    """Mean cross entropy of a client's test examples, as in `base.Scores`."""
    return risk(w, *examples(data, client, "test"))


def alignment(w, x, targets):
    """mean_l (1/d) ||f(x_l) - target_l||^2."""
    return np.mean((features(w, x) - targets) ** 2)


def discrepancy(left, right):
    """Squared maximum mean discrepancy of two sets of rows, with a sum of Gaussian kernels."""

    def mean_kernel(a, b):
        squares = ((a[:, None] - b) ** 2).sum(-1)
        return sum(np.exp(-squares / (2 * width)).mean() for width in (10, 15, 20, 50))

    return mean_kernel(left, left) + mean_kernel(right, right) - 2 * mean_kernel(left, right)


def cross_entropy_gradient(w, x, y):
    """Gradient of the mean cross entropy with respect to everything."""
    return numerical_gradient(lambda w: risk(w, x, y), w)


def alignment_gradient(w, x, targets):
    """Gradient of `alignment` with respect to the backbone."""
    return numerical_gradient(lambda backbone: alignment(w | backbone, x, targets), part(w, "backbone"))


def descend(w, gradient, steps, lr, momentum=0.0, weight_decay=0.0):
    """Full-batch SGD as PyTorch applies it, on the entries that gradient(w) names."""
    w, velocity = dict(w), {}
    for _ in range(steps):
        for name, value in gradient(w).items():
            velocity[name] = momentum * velocity.get(name, 0.0) + value + weight_decay * w[name]
        w = {name: value - lr * velocity[name] if name in velocity else value for name, value in w.items()}
    return w


def fisher_trace(w, x, y):
    """Mean over examples of the squared norm of the gradient of log p(y|x), one example at a time."""
    gradients = [cross_entropy_gradient(w, x[i : i + 1], y[i : i + 1]) for i in range(len(x))]
    return np.mean([sum((value**2).sum() for value in gradient.values()) for gradient in gradients])


def mean(weights, ws):
    """The weighted mean of flat dicts."""
    return {name: sum(a * w[name] for a, w in zip(weights, ws, strict=True)) for name in ws[0]}


def examples(data, client, split="train"):
    """A client's real examples as float64 x and integer y."""
    rows = client_data(data, client, split)
    mask = np.asarray(rows.mask)
    return np.float64(rows.x)[mask], np.asarray(rows.y)[mask]


def convolve(x, kernel, padding, stride=1):
    """Convolution [B, H, W, C] with [h, w, C, O], as deep learning has it."""
    x = np.pad(np.float64(x), ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(x, kernel.shape[:2], axis=(1, 2))
    return np.einsum("bijcuv,uvco->bijo", windows, np.float64(kernel))[:, ::stride, ::stride]


def minimizer_on_simplex(matrix):
    """Of s.Ps for one positive definite P = A'A, in float64.

    Nonnegative least squares |Ax|^2 + (sum x - 1)^2 over x = t s, s on the simplex, is least at t = 1 / (1 + s.Ps)
    with the value s.Ps / (1 + s.Ps): its direction s minimizes s.Ps.
    """
    matrix = np.float64(matrix)
    size = len(matrix)
    factor = np.linalg.cholesky(matrix / matrix.mean()).T
    weights, _ = nnls(np.vstack([factor, np.ones(size)]), np.append(np.zeros(size), 1.0), maxiter=100 * size)
    return weights / weights.sum()


def nearest_on_simplex(target):
    """By bisection over what is taken off every entry."""
    low, high = target.min() - 1, target.max()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(target - middle, 0).sum() > 1 else (low, middle)
    return np.maximum(target - low, 0)


def head_weights(mu, variance, counts):
    """FedPAC's Eq. 46, row by row, without weights below a thousandth."""
    rows = []
    for own in mu:
        differences = (own - mu).reshape(len(mu), -1)
        weights = minimizer_on_simplex(differences @ differences.T + np.diag(variance / counts))
        weights[weights < 1e-3] = 0
        rows.append(weights / weights.sum())
    return np.stack(rows)


def layer_norm(x, scale, bias, epsilon):
    """Normalization of the last axis."""
    deviation = x - x.mean(-1, keepdims=True)
    return deviation / np.sqrt((deviation**2).mean(-1, keepdims=True) + epsilon) * scale + bias


def attention(query, key, value, heads, norms=None):
    """Self-attention of the tokens [T, d] of one example, head by head; `norms`: of each head's queries and keys."""
    mixed = []
    for part in np.split(np.arange(query.shape[1]), heads):
        q, k = query[:, part], key[:, part]
        if norms is not None:
            q, k = (layer_norm(x, *norm, 1e-6) for x, norm in zip((q, k), norms, strict=True))
        mixed.append(np.exp(log_softmax(q @ k.T / np.sqrt(len(part)))) @ value[:, part])
    return np.concatenate(mixed, -1)


def gelu(x):
    return x * (1 + special.erf(x / np.sqrt(2))) / 2


def numerical_gradient(loss, w, step=1e-6):
    """Gradient of loss(w) by forward differences, for flat dicts of float64 arrays: as obvious as its loss."""
    gradient, here = {}, loss(w)
    for name, value in w.items():
        gradient[name] = np.zeros_like(value)
        for index in np.ndindex(value.shape):
            moved = value.copy()
            moved[index] += step
            gradient[name][index] = (loss({**w, name: moved}) - here) / step
    return gradient
