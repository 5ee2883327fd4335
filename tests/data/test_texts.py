"""`pfl_jax.data.texts`: files of texts, each the category that it is filed under."""

import numpy as np
import pytest

from pfl_jax.data.texts import CATEGORIES, FOLDER, fortunes
from pfl_jax.errors import InvalidInput

tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture
def files(tmp_path):
    """Folder with two categories, and a tokenizer of words that numbers them by their first letter."""
    (tmp_path / "fruit").write_text("an apple\n%\na banana\n\ta cherry\n%\nan apple\n%\na date\n%\n")
    (tmp_path / "tools").write_text("a hammer\n%\nan apple\n%\na lathe a lathe a lathe a lathe\n%\n")
    words = ["[PAD]", "a", "an", "apple", "banana", "cherry", "date", "hammer", "lathe"]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[PAD]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def load(files, **options):
    return fortunes(files / "tokenizer.json", folder=files, categories=("fruit", "tools"), **options)


def test_texts_are_tokens_with_the_category_as_label(files):
    dataset = load(files, length=4, test_share=0.4)
    assert (dataset.train_x.shape, dataset.test_x.shape) == ((3, 4), (2, 4))
    x, y = np.concatenate([dataset.test_x, dataset.train_x]), np.concatenate([dataset.test_y, dataset.train_y])
    found = {tuple(row): label for row, label in zip(x.tolist(), y.tolist(), strict=True)}
    # "an apple" counts once, for the first category that has it; long texts are cut.
    assert found == {(2, 3, 0, 0): 0, (1, 4, 1, 5): 0, (1, 6, 0, 0): 0, (1, 7, 0, 0): 1, (1, 8, 1, 8): 1}


def test_test_texts_are_always_the_same(files):
    first, second = load(files), load(files)
    np.testing.assert_array_equal(first.test_x, second.test_x)


def test_what_is_missing_or_no_tokenizer_is_one_line(files):
    with pytest.raises(InvalidInput, match="apt-get install fortunes"):
        fortunes(files / "tokenizer.json", folder=files, categories=("fruit", "trees"))
    with pytest.raises(InvalidInput, match=r"the tokenizer .*fruit cannot be read"):
        fortunes(files / "fruit", folder=files, categories=("fruit",))


@pytest.mark.real_data
@pytest.mark.skipif(not FOLDER.is_dir(), reason="apt-get install fortunes")
def test_debian_s_texts_are_there(files):
    dataset = fortunes(files / "tokenizer.json")
    assert len(dataset.train_y) + len(dataset.test_y) > 11_000
    assert np.bincount(dataset.train_y, minlength=len(CATEGORIES)).min() > 80
