"""Short English texts of Debian's package fortunes, each with its category."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pfl_jax.data.sources import Dataset
from pfl_jax.errors import InvalidInput, imported, one_line

FOLDER = Path("/usr/share/games/fortunes")
"""Folder of the texts after `apt-get install fortunes`."""

CATEGORIES = (
    *("art", "computers", "definitions", "education", "food", "humorists", "kids", "knghtbrd", "law", "linux"),
    *("literature", "love", "people", "perl", "platitudes", "politics", "riddles", "science", "songs-poems", "sports"),
    *("startrek", "wisdom", "work", "zippy"),
)
"""Default categories: those with more than 120 texts that insult no group of people."""


def fortunes(
    tokenizer: str | Path,
    *,
    folder: str | Path = FOLDER,
    categories: Sequence[str] = CATEGORIES,
    length: int = 32,
    test_share: float = 0.25,
) -> Dataset:
    """Texts of some categories as tokens; the task is to predict their category.

    A text that occurs twice counts once. A quarter of the texts, always the same, are test examples.

    Args:
      tokenizer: tokenizer.json of a Hugging Face model, whose padding is token 0.
      folder: folder of the files, one for each category, in which lines of "%" divide the texts.
      categories: names of the files; class k is the k-th.
      length: T, number of tokens of an example; longer texts are cut off, shorter ones padded with 0.
      test_share: share of the texts that are test examples, in (0, 1).

    Returns:
      The dataset, with inputs int32 [P, T].

    Raises:
      InvalidInput: a file is missing, the tokenizer cannot be read, or the package tokenizers is not installed.
    """
    texts, labels = _texts(Path(folder), categories)
    order = np.random.default_rng(0).permutation(len(texts))
    x, y = _tokens(Path(tokenizer), texts, length)[order], np.array(labels, np.int32)[order]
    tests = max(1, round(test_share * len(texts)))
    arrays = x[tests:], y[tests:], x[:tests], y[:tests]
    origin, classes = f"{len(texts)} texts of {folder}", tuple(categories)
    return Dataset("fortunes", "files", origin, True, *arrays, len(classes), class_names=classes)


def _texts(folder: Path, categories: Sequence[str]) -> tuple[list[str], list[int]]:
    """Distinct texts of the categories, and their labels; a text in several categories counts for the first."""
    found: dict[str, int] = {}
    for label, category in enumerate(categories):
        try:
            content = (folder / category).read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise InvalidInput(
                f"the texts of {category} cannot be read ({one_line(error, 100)}): apt-get install fortunes, or give "
                "the folder of its files"
            ) from None
        for text in content.split("\n%\n"):
            if words := " ".join(text.split()).removesuffix(" %"):
                found.setdefault(words, label)
    return list(found), list(found.values())


def _tokens(path: Path, texts: list[str], length: int) -> np.ndarray:
    """Tokens int32 [P, T] of texts."""
    tokenizers = imported("tokenizers", 'texts need tokenizers: pip install "tokenizers>=0.20,<1"')
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        raise InvalidInput(f"the tokenizer {path} cannot be read: {one_line(error, 100)}") from None
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length)
    return np.array([encoded.ids for encoded in tokenizer.encode_batch(texts)], np.int32)
