"""docs/other-tasks.md: the federations that it makes, as it stands."""

import re
from pathlib import Path

import numpy as np
import pytest

PAGE = (Path(__file__).parents[1] / "docs/other-tasks.md").read_text()
DIABETES, FORTUNES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def names(*blocks):
    found = {}
    for text in blocks:
        exec(compile(text, "docs/other-tasks.md", "exec"), found)
    return found


def test_diabetes(capsys):
    found = names(DIABETES)
    federation = found["diabetes"]
    sizes = {
        name: int(count) for name, count in zip(found["patients"].client_names, federation.train_count, strict=True)
    }
    assert capsys.readouterr().out == f"{sizes}\n"
    assert len(sizes) == 8
    assert min(sizes.values()) >= 25
    assert federation.num_classes == 0
    assert federation.y.dtype == np.float32
    assert len(federation.y) == 442
    assert abs(float(federation.y.std()) - 1) < 1e-5


@pytest.mark.skipif(not Path("/usr/share/games/fortunes").exists(), reason="needs Debian's package fortunes")
def test_fortunes(capsys):
    found = names(DIABETES, FORTUNES)
    federation, x, y = found["fortunes"], *(np.asarray(found["fortunes"][index]) for index in (0, 1))
    assert capsys.readouterr().out.endswith(f"\n{len(found['texts'])} {x.shape} int32\n")
    assert federation.train_count.tolist() == [75] * federation.num_clients
    assert x.shape == y.shape
    # A target is the next input; behind a text there is neither.
    np.testing.assert_array_equal(np.where(x[:, 1:] > 0, x[:, 1:], -1), y[:, :-1])
    assert (x > 0).any(axis=1).all()
    assert x.max() == found["CHARACTERS"] + 1
