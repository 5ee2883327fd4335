"""The examples in the docstrings of pfl_jax run and give what they show."""

import doctest
import importlib
from pathlib import Path

import pytest

import pfl_jax

ROOT = Path(pfl_jax.__file__).parent


def examples():
    """Every docstring with an example, as doctest has it; modules without any are not imported for it."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        if ">>>" in path.read_text():
            parts = path.relative_to(ROOT.parent).with_suffix("").parts
            module = importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
            # No names but its own: what a reader copies must run as it stands.
            found += doctest.DocTestFinder(exclude_empty=True).find(module, globs={})
    return [example for example in found if example.examples]


@pytest.mark.parametrize("example", examples(), ids=lambda example: example.name)
def test_example(example):
    report = []
    result = doctest.DocTestRunner().run(example, out=report.append)
    assert result.attempted
    assert not result.failed, "".join(report)


def test_the_entry_points_and_primitives_have_examples():
    names = {example.name.removeprefix("pfl_jax.") for example in examples()}
    modules = "aggregation losses tree feature_statistics simplex_qp head_combination fisher float64 local_training"
    modules = [f"primitives.{name}" for name in modules.split()]
    modules += ["networks.convolution", "data.partition", "data.federated"]
    assert {"pfl_jax", "engine.sweep.run", "networks.models.mlp", "data.sources.load"} <= names
    assert all(any(name.startswith(f"{module}.") for name in names) for module in modules)
