"""Networks, and their convolution and pooling operations; `from_flax` takes any Flax module."""

from pfl_jax.networks.flax_modules import from_flax as from_flax
from pfl_jax.networks.flax_modules import to_flax as to_flax
from pfl_jax.networks.mixed import with_features as with_features
from pfl_jax.networks.split import split as split
