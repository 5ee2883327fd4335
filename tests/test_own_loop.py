"""docs/your-own-loop.md: its code runs, and all of its loops give what `run` gives."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

PAGE = (Path(__file__).parents[1] / "docs/your-own-loop.md").read_text()


@pytest.mark.without_f1_auc
def test_loops_of_ones_own_give_what_run_gives(capsys):
    names = {}
    for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(text, "docs/your-own-loop.md", "exec"), names)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"seed 0: {names['by_hand'].mean():.3f}"
    assert lines[1].startswith("seed 1: ")
    assert len(lines) == 3
    assert names["cohorts"].tolist() == [list(range(8))] * 5

    def assert_same(left, right):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4),
            *(state._replace(key=(), trained=()) for state in (left, right)),
        )

    assert_same(names["scanned"], names["state"])
    # The first of three seeds, by itself and beside the others.
    assert_same(jax.tree.map(lambda leaf: leaf[0], names["states"]), names["state"])
    np.testing.assert_allclose(names["scores"]["accuracy"][0], names["by_hand"], atol=0.05)
