"""Functions that derive a method from another, such as private, compressed or robust ones."""

from pfl_jax.wrappers.server_state import with_server_state as with_server_state
