"""Every method on a tiny transformer whose base is frozen: it trains its adapters and its classifier."""

import flax.linen as nn
import pytest

from pfl_jax import networks
from pfl_jax.methods import METHODS
from pfl_jax.networks import adapters
from pfl_jax.testing import conformance
from pfl_jax.testing.problems import SHAPE


class Transformer(nn.Module):
    """One layer of attention over the two rows of an input."""

    @nn.compact
    def __call__(self, x):
        tokens = nn.Dense(8, name="embedding")(x.reshape(len(x), *SHAPE[:2]))
        mixed = nn.MultiHeadDotProductAttention(2, name="attention")(tokens, tokens)
        states = nn.LayerNorm(name="norm")(tokens + mixed)
        return nn.Dense(3, name="head")(states.mean(1))


# A method with adapters in the states of clients runs by default; compiling all takes minutes.
@pytest.fixture(
    params=[name if name == "feddpa" else pytest.param(name, marks=pytest.mark.slow) for name in METHODS],
    scope="module",
)
def subject(request):
    base = networks.from_flax(Transformer(), SHAPE, 3)
    model = adapters.lora(base, SHAPE, rank=2, alpha=8.0, targets="embedding|query|value")
    # At the usual rate, rounding grows beyond the tolerance in feddbe and pfedfda.
    return conformance.Subject(METHODS[request.param], model=model, lr=0.02)


@pytest.mark.parametrize("check", ["structure", "one_trace", "chunks_and_padding", "clients_outside", "resumption"])
def test_conformance(subject, check):
    conformance.CHECKS[check](subject)
