"""Statement of a method about differential privacy."""

from typing import NamedTuple

import jax


class Privacy(NamedTuple):
    """Uses of a client's data in a method beyond those that differential privacy covers, see `pfl_jax.privacy`.

    With `dp_clip`, every step of `LocalTraining.fit` is private; with `client_clip`, the update that a client sends is.
    The neighboring relation keeps the number of examples, which therefore counts as public.

    Attributes:
      passes: private passes over a client's examples in a round in which the client takes part.
      examples: with `dp_clip`, results computed from the examples without clipping and noise, and where they go.
      deployment: private passes of fine-tuning, before a client uses its model.
      refused: reason why the method cannot train with `dp_clip`; "" if it can.
      clients: with `client_clip`, parts sent by a client besides its clipped update; None if the method sends no update
        that `pfl_jax.wrappers.client_privacy` can clip.
    """

    passes: int | jax.Array = 0
    examples: tuple[str, ...] = ()
    deployment: int | jax.Array = 0
    refused: str = ""
    clients: tuple[str, ...] | None = None
