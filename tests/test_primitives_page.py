"""docs/primitives.md: every public primitive has its row and its example, and the examples give what they show."""

import doctest
import re
from pathlib import Path

from pfl_jax import primitives

PAGE = (Path(__file__).parents[1] / "docs/primitives.md").read_text()
EXAMPLES = "\n".join(re.findall(r"```pycon\n(.*?)```", PAGE, re.DOTALL))
NAMES = {name for name, thing in vars(primitives).items() if name[0] != "_" and hasattr(thing, "__module__")}


def test_every_primitive_has_a_row_and_an_example():
    rows = {name for row in re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE) for name in re.findall(r"`(\w+)\(", row)}
    assert rows == NAMES
    assert set(re.findall(r"primitives\.(\w+)", EXAMPLES)) >= NAMES


def test_the_examples():
    report = []
    example = doctest.DocTestParser().get_doctest(EXAMPLES, {}, "docs/primitives.md", None, 0)
    assert not doctest.DocTestRunner().run(example, out=report.append).failed, "".join(report)
