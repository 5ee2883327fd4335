"""Federations with their own clients: writers, roles in plays, users; from the files of LEAF and of TFF.

`data` is the folder of LEAF's files (`train/` and `test/`, made by its preprocess.sh), TFF's SQLite file (.sqlite,
also .lzma, .xz or .gz, which is unpacked beside it), or the folder of TFF's HDF5 files; docs/natural.md says where to
get them. Clients are the first ones by name. LEAF's and TFF's split within users is kept. If LEAF split by user, so
that no user has both training and test rows, each user's rows are divided here, and the users of `test/` come last.
"""

import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from pfl_jax.data import readers, tff
from pfl_jax.data.sites import EVERYTHING, SITES, Client, Limits, federation
from pfl_jax.data.sources import Dataset
from pfl_jax.errors import InvalidInput

LENGTH = 80
"""Characters in an example of Shakespeare: in LEAF's files, and after cutting the texts of TFF's users."""

PADDING, UNKNOWN, BEGIN, END = range(4)
"""Special symbols, numbered before the characters."""

CHARACTERS = {ord(character): number for number, character in enumerate("\n" + string.printable[:95], start=END + 1)}
"""Character -> its symbol: the end of a line, and the 95 printable characters of ASCII."""

WORDS, TAGS, MOST_WORDS = 10_000, 500, 100
"""Numbers of most frequent words and tags that are distinguished; and largest number of words of an example."""


A_HUNDRED = Limits(100, 500, 100)
"""100 clients of at most 500 training and 100 test examples."""


def femnist(data: str | Path, limits: Limits = EVERYTHING) -> Dataset:
    """Handwritten digits, upper and lower case letters, 62 classes, by writer: uint8 [28, 28, 1], 255 is the paper.

    Args:
      data: see the module.
      limits: how much is read.

    Raises:
      InvalidInput: the files are missing or damaged, or have fewer clients.

    Reference:
      Caldas et al. LEAF: A Benchmark for Federated Settings. 2018.
    """

    def rows(images, labels):
        # Both formats keep pixels divided by 255, which loses nothing; `write_leaf` writes whole numbers.
        x = np.asarray(images, np.float32).reshape(-1, 28, 28, 1)
        scale = 1 if x.max(initial=0) > 1 else 255
        return np.round(scale * x).astype(np.uint8), np.asarray(labels, np.int32).reshape(-1)

    features = _features(data, limits, ("all_train", "all_test"), ("pixels", "label"))
    clients = ((name, rows(*train), rows(*test)) for name, train, test in features)
    return federation("femnist", _source(data), data, clients, limits, num_classes=62)._replace(mean=(0.0,), std=(1.0,))


def shakespeare(data: str | Path, limits: Limits = EVERYTHING) -> Dataset:
    """Next character of Shakespeare's plays by role: symbols int32 [80], targets int32 [80], -1 for no target.

    In LEAF's files the only target is the character after an example's 80 symbols. TFF's files have texts: each begins
    and ends with a special symbol and is cut into pieces of 80, in which every character is a target.

    Args:
      data, limits: see `femnist`.

    Raises:
      InvalidInput: see `femnist`.

    Reference:
      McMahan et al. Communication-Efficient Learning of Deep Networks from Decentralized Data. AISTATS 2017; Caldas et
      al. 2018. Their alphabets have 80 and 86 characters; ours is ASCII.
    """
    rows = _next_of_leaf if _source(data) == "LEAF" else _next_of_texts
    features = _features(data, limits, ("train", "test"), ("snippets",))
    clients = ((name, rows(*train), rows(*test)) for name, train, test in features)
    return federation("shakespeare", _source(data), data, clients, limits, num_classes=0)


def stackoverflow_tags(data: str | Path, limits: Limits = A_HUNDRED) -> Dataset:
    """Tags of questions and answers on Stack Overflow by user: numbers of words int32 [100], flags of 500 tags.

    Words come from the text and the title, numbered from 1 by their frequency in the training rows that are read: the
    10,000 most frequent ones; 10,001 is any other. Longer texts are cut off, shorter ones padded with 0.

    Args:
      data: TFF's files, see `femnist`.
      limits: how much is read; everything would be 135,818,730 examples.

    Raises:
      InvalidInput: see `femnist`.

    Reference:
      Reddi et al. Adaptive Federated Optimization. ICLR 2021, which counts words and tags over all users.
    """
    return federation("stackoverflow_tags", _source(data), data, _posts(data, limits), limits, num_classes=0)


def _posts(data: str | Path, limits: Limits) -> Iterator[Client]:
    """Words and tags of each user's posts."""
    features = list(_features(data, limits, ("train", "test"), ("tokens", "title", "tags")))
    examples = [one for _, train, _ in features for one in list(zip(*train, strict=True))[: limits.train]]
    words = _most_frequent((word for text, title, _ in examples for word in _words(text, title)), WORDS)
    tags = _most_frequent((tag for *_, label in examples for tag in _tags(label)), TAGS)

    def rows(texts, titles, labels):
        x, y = np.zeros((len(texts), MOST_WORDS), np.int32), np.zeros((len(texts), len(tags)), np.int32)
        for numbers, flags, text, title, label in zip(x, y, texts, titles, labels, strict=True):
            found = _words(text, title)[:MOST_WORDS]
            numbers[: len(found)] = [1 + words.get(word, WORDS) for word in found]
            flags[[tags[tag] for tag in _tags(label) if tag in tags]] = 1
        return x, y

    yield from ((name, rows(*train), rows(*test)) for name, train, test in features)


NATURAL: dict[str, Callable[..., Dataset]] = {
    "femnist": femnist,
    "shakespeare": shakespeare,
    "stackoverflow_tags": stackoverflow_tags,
    **SITES,
}
"""Federations by name: (data, limits) -> Dataset."""


def _source(data: str | Path) -> str:
    return "LEAF" if readers.is_leaf(Path(data).expanduser()) else "TFF"


def _features(
    data: str | Path, limits: Limits, splits: tuple[str, str], features: Sequence[str]
) -> Iterator[tff.Features]:
    """Clients from LEAF's files, or from TFF's, in which splits and features have these names."""
    path = Path(data).expanduser()
    return _leaf_users(path, limits) if _source(data) == "LEAF" else tff.read(path, splits, features, limits.clients)


def _leaf_users(path: Path, limits: Limits) -> Iterator[tff.Features]:
    """Users in LEAF's files: those with training and test rows; or, if LEAF split by user, all, with divided rows."""
    train, test = (
        {name: (x, y) for name, x, y in readers.leaf_users(readers.leaf_files(path).get(split, []))}
        for split in ("train", "test")
    )
    if both := sorted(train.keys() & test.keys()):
        yield from ((name, train[name], test[name]) for name in both[: limits.clients])
        return
    # The users of test/ come last, and all of them are kept: they do not take part in training.
    kept = None if limits.clients is None else max(1, limits.clients - len(test))
    for name, (x, y) in [*sorted(train.items())[:kept], *sorted(test.items())][: limits.clients]:
        cut = len(y) - min(max(round(limits.test_fraction * len(y)), 1), len(y) - 1)
        if len(y) < 2:
            raise InvalidInput(f"user {name} has {len(y)} sample, and needs one for training and one for testing")
        yield name, (x[:cut], y[:cut]), (x[cut:], y[cut:])


def _symbols(text: str) -> list[int]:
    return [CHARACTERS.get(ord(character), UNKNOWN) for character in text]


def _next_of_leaf(texts: Sequence[str], after: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    x = np.array([_symbols(text) for text in texts], np.int32)
    y = np.full(x.shape, -1, np.int32)
    y[:, -1] = [_symbols(character)[0] for character in after]
    return x, y


def _next_of_texts(texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    pieces = []
    for text in texts:
        symbols = [BEGIN, *_symbols(text.decode("utf-8", "replace")), END]
        places = np.full((-(-(len(symbols) - 1) // LENGTH), LENGTH, 2), (PADDING, -1), np.int32)
        places.reshape(-1, 2)[: len(symbols) - 1] = np.stack([symbols[:-1], symbols[1:]], axis=1)
        pieces.append(places)
    x, y = np.moveaxis(np.concatenate(pieces), -1, 0)
    return np.ascontiguousarray(x), np.ascontiguousarray(y)


def _words(text: bytes, title: bytes) -> list[str]:
    return f"{text.decode('utf-8', 'replace')} {title.decode('utf-8', 'replace')}".split()


def _tags(text: bytes) -> list[str]:
    return [tag for tag in text.decode("utf-8", "replace").split("|") if tag]


def _most_frequent(words: Iterable[str], number: int) -> dict[str, int]:
    """Words and their numbers, 0 for the most frequent one; equally frequent words in alphabetical order."""
    counts = sorted(Counter(words).items(), key=lambda pair: (-pair[1], pair[0]))
    return {word: place for place, (word, _) in enumerate(counts[:number])}
