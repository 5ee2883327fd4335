"""Small networks over integer tokens [B, T]; token 0 is padding."""

from collections.abc import Sequence
from typing import cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from pfl_jax.base import Model
from pfl_jax.errors import InvalidInput
from pfl_jax.networks.layers import Dense, assemble, last_state
from pfl_jax.tasks import NEXT_SYMBOL

VOCABULARY = 10_000
"""Default number of rows of the embedding."""

MOST_WORDS = 2**17
"""Largest number of rows that `vocabulary_of` returns."""


def vocabulary_of(tokens: np.ndarray) -> int:
    """Rows of an embedding with one row for each token: the largest token of the training data plus 1.

    At least 2 and at most `MOST_WORDS`; larger tokens share the rows.

    Args:
      tokens: integers [P, T] of the training examples, padded with 0.

    Example:
      >>> import numpy as np
      >>> from pfl_jax.networks.text import vocabulary_of
      >>> vocabulary_of(np.array([[5, 2, 0], [7, 0, 0]]))
      8
    """
    return int(np.clip(int(tokens.max(initial=0)) + 1, 2, MOST_WORDS))


def _known(x: jax.Array, vocabulary: int) -> jax.Array:
    """Tokens [B, T] below the size of the vocabulary."""
    # In federations of floats, tokens arrive as floats.
    tokens = jnp.maximum(x.astype(jnp.int32), 0)
    # Tokens beyond the vocabulary share its rows, but not the row of the padding.
    return jnp.where(tokens < vocabulary, tokens, 1 + (tokens - 1) % (vocabulary - 1))


def _embed(x: jax.Array, vocabulary: int, width: int) -> tuple[jax.Array, jax.Array]:
    """Embeddings [B, T, width] of tokens, and a mask of the words; inside a compact module."""
    tokens = _known(x, vocabulary)
    return nn.Embed(vocabulary, width, name="embedding")(tokens), tokens > 0


class MeanOfWords(nn.Module):
    """Mean of the words' embeddings, a dense layer, ReLU: tokens [B, T] -> features [B, width].

    Attributes:
      vocabulary: rows of the embedding.
      width: width of the embedding and of the features.
    """

    vocabulary: int
    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        vectors, is_word = _embed(x, self.vocabulary, self.width)
        total = jnp.sum(jnp.where(is_word[..., None], vectors, 0.0), axis=1)
        mean = total / jnp.maximum(jnp.sum(is_word, axis=1, keepdims=True), 1)
        return nn.relu(Dense(self.width, name="fc1")(mean))


class LastState(nn.Module):
    """Last state of a gated recurrent unit over the words: tokens [B, T] -> features [B, width].

    Attributes:
      vocabulary: rows of the embedding.
      width: width of the embedding and of the state.
    """

    vocabulary: int
    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        vectors, is_word = _embed(x, self.vocabulary, self.width)
        return last_state(self.width, vectors, is_word)


def _check(input_shape: Sequence[int], vocabulary: int, width: int) -> None:
    if len(input_shape) != 1:
        raise InvalidInput(f"a network over tokens needs tokens of shape (length,), not {tuple(input_shape)}")
    if vocabulary < 2 or width < 1:
        raise InvalidInput(f"vocabulary must be at least 2 and width at least 1, not {vocabulary} and {width}")


def text_mean(input_shape: Sequence[int], num_classes: int, vocabulary: int = VOCABULARY, width: int = 64) -> Model:
    """Bag of words: the mean of the words' embeddings under a dense layer with ReLU.

    644,290 parameters for two classes.

    Args:
      input_shape: (length,) of a sequence of tokens, padded with 0.
      num_classes: K.
      vocabulary: rows of the embedding; larger tokens share these rows.
      width: width of the embedding and of the features, d.

    Raises:
      InvalidInput: the inputs are not sequences, or there are no words.
    """
    _check(input_shape, vocabulary, width)
    return assemble(MeanOfWords(vocabulary, width), width, input_shape, num_classes, jnp.int32)


def text_gru(input_shape: Sequence[int], num_classes: int, vocabulary: int = VOCABULARY, width: int = 64) -> Model:
    """Gated recurrent unit over the words' embeddings; the features are its last state.

    664,962 parameters for two classes.

    Args:
      input_shape: (length,) of a sequence of tokens, padded with 0.
      num_classes: K.
      vocabulary: rows of the embedding; larger tokens share these rows.
      width: width of the embedding and of the state, d.

    Raises:
      InvalidInput: the inputs are not sequences, or there are no words.

    Reference:
      Cho et al. Learning Phrase Representations using RNN Encoder-Decoder for Statistical Machine Translation. EMNLP
      2014, Section 2.3.
    """
    _check(input_shape, vocabulary, width)
    return assemble(LastState(vocabulary, width), width, input_shape, num_classes, jnp.int32)


class StatesOfTwoLayers(nn.Module):
    """States of the second of two LSTM layers over the symbols: [B, T] -> features [B, T, width].

    Attributes:
      vocabulary: rows of the embedding.
      embedding: width of the embedding.
      width: width of the layers.
    """

    vocabulary: int
    embedding: int
    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        states, _ = _embed(x, self.vocabulary, self.embedding)
        for layer in (1, 2):
            states = nn.RNN(nn.OptimizedLSTMCell(self.width, name=f"lstm{layer}"))(states)  # pyright: ignore
        return cast(jax.Array, states)


def char_lstm(
    input_shape: Sequence[int], num_classes: int, vocabulary: int = VOCABULARY, embedding: int = 8, width: int = 256
) -> Model:
    """Two LSTM layers over embedded symbols that predict the next symbol at each place: logits [B, T, K].

    Its task is `pfl_jax.tasks.NEXT_SYMBOL`; 823,172 parameters for 100 symbols.

    Args:
      input_shape: (length,) of a sequence of symbols, padded with 0.
      num_classes: K, the number of symbols.
      vocabulary: rows of the embedding; larger symbols share these rows.
      embedding: width of the embedding.
      width: width of the layers and the features, d.

    Raises:
      InvalidInput: the inputs are not sequences, or there are no symbols.

    Reference:
      McMahan et al. Communication-Efficient Learning of Deep Networks from Decentralized Data. AISTATS 2017, Section 3.
    """
    _check(input_shape, vocabulary, width)
    backbone = StatesOfTwoLayers(vocabulary, embedding, width)
    return assemble(backbone, width, input_shape, num_classes, jnp.int32)._replace(task=NEXT_SYMBOL)


def bag_of_words(input_shape: Sequence[int], num_classes: int, vocabulary: int = VOCABULARY) -> Model:
    """Logistic regression on the frequencies of the words of a text: the model is only a head.

    5,000,500 parameters for 500 labels.

    Args:
      input_shape: (length,) of a sequence of words, padded with 0.
      num_classes: K, or the number of labels.
      vocabulary: number of features, d; larger words share them.

    Raises:
      InvalidInput: the inputs are not sequences, or there are no words.

    Reference:
      Reddi et al. Adaptive Federated Optimization. ICLR 2021, Appendix C.5 (tag prediction).
    """
    _check(input_shape, vocabulary, 1)

    def features(params, x):
        words = _known(x, vocabulary)
        counts = jnp.zeros((len(x), vocabulary)).at[jnp.arange(len(x))[:, None], words].add(words > 0)
        return counts / jnp.maximum(jnp.sum(words > 0, axis=1, keepdims=True), 1)

    head = Dense(num_classes)
    return Model(
        init=lambda key: {"backbone": {}, "head": head.init(key, jnp.zeros((1, vocabulary)))["params"]},
        features=features,
        classify=lambda params, features: cast(jax.Array, head.apply({"params": params}, features)),
        num_features=vocabulary,
        num_classes=num_classes,
    )


TEXT_MODELS = ("text_mean", "text_gru", "char_lstm", "bag_of_words")
"""Names in MODELS of the networks for tokens."""
