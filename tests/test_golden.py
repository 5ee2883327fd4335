"""A few rounds of every method on a fixed tiny problem against stored numbers.

They catch a change of results that nobody intended. After an intended one
`python tests/test_golden.py` rewrites them, or those of the methods named after it.
"""

import json
from pathlib import Path

import jax
import numpy as np

GOLDEN = Path(__file__).with_name("golden.json")


def fingerprint(name):
    """Accuracies, and sum and Euclidean norm of every array of the final state, after four partial rounds."""
    from problems import HYPER_PARAMETERS, tiny_federation, tiny_model

    from pfl_jax import simulate
    from pfl_jax.methods import METHODS

    method = METHODS[name](tiny_model(), **HYPER_PARAMETERS)
    settings = simulate.Settings(rounds=4, participation=0.75)
    *_, last = simulate.run(method, tiny_federation(), settings, jax.random.key(11))
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves((last.state.server, last.state.clients))]
    return {
        "received": [round(float(value), 6) for value in last.received],
        "trained": [round(float(value), 6) for value in last.trained],
        "sums": [float(np.float32(leaf.sum())) for leaf in leaves],
        "norms": [float(np.float32(np.linalg.norm(leaf))) for leaf in leaves],
    }


def pytest_generate_tests(metafunc):
    from pfl_jax.methods import METHODS

    metafunc.parametrize("name", METHODS)


def test_numbers_are_the_stored_ones(name):
    stored, got = json.loads(GOLDEN.read_text())[name], fingerprint(name)
    assert got.keys() == stored.keys()
    for key, values in stored.items():
        np.testing.assert_allclose(got[key], values, rtol=1e-3, atol=1e-3, err_msg=f"{name}: {key}")


if __name__ == "__main__":
    import os
    import sys

    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    from pfl_jax.methods import METHODS

    chosen = sys.argv[1:] or METHODS
    stored = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    stored |= {name: fingerprint(name) for name in chosen}
    GOLDEN.write_text(json.dumps({name: stored[name] for name in METHODS if name in stored}, indent=1) + "\n")
    print(f"wrote {', '.join(chosen)} to {GOLDEN}", file=sys.stderr)
