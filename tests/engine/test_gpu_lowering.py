"""Programs for a GPU, lowered without one: what a machine without a GPU can say about them."""

import re

import jax
import jax.numpy as jnp
import pytest

from pfl_jax import Settings, simulate
from pfl_jax.backends import BACKENDS, Choices
from pfl_jax.fast.convolution import conv2d
from pfl_jax.methods import METHODS
from pfl_jax.testing import conformance
from pfl_jax.testing.problems import tiny_federation

ON_CPUS_ONLY = re.compile(r"lapack|callback|xla_cpu", re.IGNORECASE)


def lowered(function, *arguments, platform="cuda"):
    """Text of a compiled function's program for a platform, static arguments included."""
    return function.trace(*arguments).lower(lowering_platforms=(platform,)).as_text()


def called(text):
    """Names of the library functions that a program calls."""
    return set(re.findall(r"custom_call @(\S+?)\(", text))


@pytest.fixture(autouse=True)
def _on_a_machine_with_a_gpu(monkeypatch):
    """Functions in 64-bit mode are lowered for the platform of the machine, when they are traced."""
    # Another test may have traced them.
    jax.clear_caches()
    monkeypatch.setattr(jax.export, "default_export_platform", lambda: "cuda")


@pytest.mark.parametrize(
    "name", [name if name == "fedas" else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]
)
def test_no_program_of_a_run_calls_what_only_cpus_have(name):
    data, subject = tiny_federation(), conformance.Subject(METHODS[name])
    engine = simulate.build(subject.build(), Settings(rounds=1)).jit()
    key = jax.random.key(0)
    state = jax.eval_shape(engine.init, data, key)
    texts = [lowered(engine.init, data, key), lowered(engine.round, data, state, 3)]
    texts.append(lowered(engine.evaluate, data, state))
    for text in texts:
        assert not {call for call in called(text) if ON_CPUS_ONLY.search(call)}


def test_the_quadratic_programs_are_factorized_by_the_platforms_own_library():
    data, subject = tiny_federation(), conformance.Subject(METHODS["fedpac"])
    engine = simulate.build(subject.build(), Settings(rounds=1)).jit()
    state = jax.eval_shape(engine.init, data, jax.random.key(0))
    on_cpu, on_gpu = (called(lowered(engine.round, data, state, 3, platform=name)) for name in ("cpu", "cuda"))
    assert any("lapack" in call for call in on_cpu)
    assert any("cusolver" in call or "cublas" in call for call in on_gpu)


@pytest.mark.parametrize(("platform", "convolutions"), [("cuda", False), ("cpu", True)])
def test_a_gpu_has_matrix_products_in_place_of_convolutions(platform, convolutions):
    x, kernel = jnp.ones((2, 8, 8, 1)), jnp.ones((3, 3, 1, 4))
    text = lowered(jax.jit(jax.grad(lambda kernel: conv2d(x, kernel, 1).sum())), kernel, platform=platform)
    assert ("stablehlo.convolution" in text) == convolutions


def test_the_table_of_backends_says_which_form_a_gpu_gets(monkeypatch):
    monkeypatch.setitem(BACKENDS, "default", Choices("lax", None))
    x, kernel = jnp.ones((2, 9, 9, 1)), jnp.ones((3, 3, 1, 4))
    text = lowered(jax.jit(lambda kernel: conv2d(x, kernel, 1)), kernel, platform="cuda")
    assert "stablehlo.convolution" in text
