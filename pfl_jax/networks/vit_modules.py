"""Parts of a vision transformer as Flax modules."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

EPSILON = 1e-6
"""Number added to the variance in layer normalizations."""


class VitConfig(NamedTuple):
    """Sizes of a vision transformer.

    Attributes:
      patch: side length of the square patches.
      width: width of the hidden states, d.
      layers: number of transformer layers.
      heads: attention heads of a layer.
      hidden: width of the layers' perceptrons.
      registers: number of register tokens, which have no position.
      layer_scale: whether a layer's output is scaled before it is added: by a factor per feature that begins at 1e-5.
      normalized_queries: whether each head's queries and keys are normalized.

    Reference:
      Darcet, Oquab, Mairal, Bojanowski. Vision Transformers Need Registers. ICLR 2024. Touvron et al. Going Deeper with
      Image Transformers. ICCV 2021 (LayerScale). Dehghani et al. Scaling Vision Transformers to 22 Billion Parameters.
      ICML 2023, Section 2 (queries and keys).
    """

    patch: int
    width: int
    layers: int
    heads: int
    hidden: int
    registers: int = 0
    layer_scale: bool = False
    normalized_queries: bool = False


class VitEmbeddings(nn.Module):
    """Embeddings of the class, registers and patches: [B, H, W, C] -> [B, 1 + registers + patches, d].

    Class and patches have positions.
    """

    config: VitConfig

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        side, width = self.config.patch, self.config.width
        patches = nn.Conv(width, (side, side), strides=side, padding="VALID", name="patches")(images)
        patches = patches.reshape(len(images), -1, width)
        small = nn.initializers.normal(0.02)
        first = jnp.broadcast_to(self.param("class", small, (1, 1, width)), (len(images), 1, width))
        positions = self.param("positions", small, (1, 1 + patches.shape[1], width))
        states = jnp.concatenate([first, patches], axis=1) + positions
        if not self.config.registers:
            return states
        registers = self.param("registers", small, (1, self.config.registers, width))
        registers = jnp.broadcast_to(registers, (len(images), *registers.shape[1:]))
        return jnp.concatenate([states[:, :1], registers, states[:, 1:]], axis=1)


class VitLayer(nn.Module):
    """Self-attention and perceptron, each after a layer normalization and under a residual: [B, T, d] -> [B, T, d]."""

    config: VitConfig

    @nn.compact
    def __call__(self, states: jax.Array) -> jax.Array:
        config, (*rows, width) = self.config, states.shape
        heads = (*rows, config.heads, width // config.heads)
        x = nn.LayerNorm(EPSILON, name="attention_norm")(states)
        query, key, value = (nn.Dense(width, name=name)(x).reshape(heads) for name in ("query", "key", "value"))
        if config.normalized_queries:
            query = nn.LayerNorm(EPSILON, use_fast_variance=False, name="query_norm")(query)
            key = nn.LayerNorm(EPSILON, use_fast_variance=False, name="key_norm")(key)
        mixed = jax.nn.dot_product_attention(query, key, value).reshape(states.shape)
        states = states + self._scaled("attention_scale", nn.Dense(width, name="attention_output")(mixed))
        x = nn.Dense(config.hidden, name="intermediate")(nn.LayerNorm(EPSILON, name="output_norm")(states))
        x = nn.Dense(width, name="output")(nn.gelu(x, approximate=False))
        return states + self._scaled("output_scale", x)

    def _scaled(self, name: str, x: jax.Array) -> jax.Array:
        if not self.config.layer_scale:
            return x
        return x * self.param(name, nn.initializers.constant(1e-5), x.shape[-1:])


class VitEncoder(nn.Module):
    """Vision transformer: images [B, H, W, C] -> normalized state of the class [B, d]."""

    config: VitConfig

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        states = VitEmbeddings(self.config, name="embeddings")(images.astype(jnp.float32))
        for index in range(self.config.layers):
            states = VitLayer(self.config, name=f"layer_{index}")(states)
        return nn.LayerNorm(EPSILON, name="norm")(states[:, 0])


class VitClassifier(nn.Module):
    """A dense classifier of K outputs on a `VitEncoder`."""

    config: VitConfig
    num_classes: int

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        return nn.Dense(self.num_classes, name="classifier")(VitEncoder(self.config, name="encoder")(images))
