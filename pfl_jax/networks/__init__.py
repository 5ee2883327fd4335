"""Networks, and their convolution and pooling operations; `from_flax` and `from_torch` accept your own modules."""

from pfl_jax.networks.flax_modules import from_flax as from_flax
from pfl_jax.networks.flax_modules import to_flax as to_flax
from pfl_jax.networks.mixed import with_features as with_features
from pfl_jax.networks.split import split as split
from pfl_jax.networks.torch_modules import from_torch as from_torch
from pfl_jax.networks.torch_modules import to_torch as to_torch
