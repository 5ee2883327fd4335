"""Former name of `pfl_jax.validation`, which methods in users' own files import."""

from pfl_jax.validation import *  # noqa: F403
