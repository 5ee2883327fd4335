"""docs/other-tasks.md as it stands: two of its comparisons always, and all of them in `pytest -m slow`."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

from pfl_jax import tasks

PAGE = (Path(__file__).parents[1] / "docs/other-tasks.md").read_text()
TOOLS, DIABETES, NUMBERS, FORTUNES, CHARACTERS, LABELS, OWN_LOSS, DROPOUT = re.findall(
    r"```python\n(.*?)```", PAGE, re.DOTALL
)
needs_fortunes = pytest.mark.skipif(
    not Path("/usr/share/games/fortunes").exists(), reason="needs Debian's package fortunes"
)


def names(*blocks):
    found = {}
    for text in (TOOLS, *blocks):
        exec(compile(text, "docs/other-tasks.md", "exec"), found)
    return found


def printed(capsys):
    """Method -> score -> value, of the last lines of what `show` prints."""
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    return {
        method: dict(zip(rest[::2], map(float, rest[1::2]), strict=True))
        for method, *rest in lines
        if method in ("local", "fedavg", "fedper", "centralised")
    }


def test_diabetes(capsys):
    found = names(DIABETES)
    federation = found["diabetes"]
    sizes = {
        name: int(count) for name, count in zip(found["patients"].client_names, federation.train_count, strict=True)
    }
    assert capsys.readouterr().out == f"{sizes}\n"
    assert federation.num_classes == 0
    together = found["one_client"](federation)
    assert together.train_count.tolist() == [federation.train_count.sum()]


def test_numbers(capsys):
    names(DIABETES, NUMBERS)
    scores = printed(capsys)
    assert list(scores) == ["local", "fedavg", "centralised"]
    # Of the mean of all targets they would be 1 and less than 0.
    assert all(of["mse"] < 0.8 and of["r2"] > 0.1 for of in scores.values())


@needs_fortunes
@pytest.mark.slow
def test_characters(capsys):
    found = names(FORTUNES, CHARACTERS)
    scores = printed(capsys)
    assert list(scores) == ["local", "fedper", "centralised"]
    x, y = (np.asarray(found["fortunes"][index]) for index in (0, 1))
    # A target is the next input; behind a text there is neither.
    np.testing.assert_array_equal(np.where(x[:, 1:] > 0, x[:, 1:], -1), y[:, :-1])
    # All symbols alike: log 82.
    assert all(of["cross_entropy"] < np.log(found["symbols"]) for of in scores.values())
    # A character is not predicted from itself as the next one.
    model, codes = found["model"], np.asarray(found["fortunes"].x[:1])
    params = model.init(jax.random.key(0))
    changed = codes.copy()
    changed[0, 20] += 1
    differs = np.abs(np.asarray(model.apply(params, codes) - model.apply(params, changed))).max(axis=-1)[0] > 0
    assert np.flatnonzero(differs).tolist() == list(range(20, 28))


def test_labels(capsys):
    names(LABELS)
    assert list(printed(capsys)) == ["local", "fedper", "centralised"]


@pytest.mark.slow
def test_own_loss(capsys):
    found = names(LABELS.partition("labels = ")[0], OWN_LOSS)
    scores = printed(capsys)
    assert list(scores) == ["local", "fedper", "centralised"]
    assert found["model"].task.scores == tasks.CLASSIFICATION.scores
    assert all(of["accuracy"] > 0.3 for of in scores.values())


@pytest.mark.slow
def test_dropout(capsys):
    names(OWN_LOSS.partition("own_loss = ")[0], DROPOUT)
    assert list(printed(capsys)) == ["local", "fedper", "centralised"]
