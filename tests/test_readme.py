"""The README's code runs as it stands, and its new method passes as a method."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest
from problems import HYPER_PARAMETERS, tiny_federation, tiny_model

from pfl_jax import simulate
from pfl_jax.methods import METHODS
from pfl_jax.simulate import Settings

BLOCKS = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[1] / "README.md").read_text(), re.DOTALL)


def block(marker):
    (found,) = [code for code in BLOCKS if marker in code]
    return found


def test_the_library_example_runs_and_learns(capsys):
    exec(compile(block("simulate.run("), "README.md", "exec"), {"__name__": "readme"})
    rounds = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [int(number) for number, _ in rounds] == [1, 2, 3, 4, 5]
    assert float(rounds[-1][1]) > 0.7


def test_the_method_example_is_a_method():
    namespace = {"__name__": "readme"}
    exec(compile(block("def fedavgm("), "README.md", "exec"), namespace)
    fedavgm, data = namespace["fedavgm"], tiny_federation()

    def run(method, rounds=6):
        *_, last = simulate.run(method, data, Settings(rounds=rounds), jax.random.key(0))
        return last

    # Its limit: without server momentum it is FedAvg.
    plain = METHODS["fedavg"](tiny_model(), **HYPER_PARAMETERS)
    still = run(fedavgm(tiny_model(), server_momentum=0.0, **HYPER_PARAMETERS))
    np.testing.assert_allclose(still.received, run(plain).received, atol=1e-6)
    moving = run(fedavgm(tiny_model(), server_momentum=0.9, **HYPER_PARAMETERS))
    kernel = moving.state.server[0]["head"]["kernel"]
    assert np.abs(kernel - still.state.server[0]["head"]["kernel"]).max() > 1e-3
    assert np.isfinite(kernel).all()


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_named_in_the_readme(name):
    assert f"`{name}`" in (Path(__file__).parents[1] / "README.md").read_text()
