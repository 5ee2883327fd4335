"""A few rounds of every method on a fixed tiny problem, as numbers that are stored in golden.json.

They catch a change of results that nobody intended. After an intended one
`python tests/support/golden.py` rewrites them, or those of the methods named after it.
"""

import json
from pathlib import Path

import jax
import numpy as np

FILE = Path(__file__).with_name("golden.json")


def fingerprint(engine):
    """Accuracies, and sum and Euclidean norm of every array of the final state, after four rounds of three clients.

    Args:
      engine: of a method with `problems.tiny_model` and `problems.HYPER_PARAMETERS`, clients one after another.
    """
    from problems import tiny_federation

    data = tiny_federation()
    state = engine.init(data, jax.random.key(11))
    for _ in range(4):
        state, _ = engine.round(data, state, 3)
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves((state.server, state.clients))]
    return {
        "received": [round(float(value), 6) for value in engine.evaluate(data, state).accuracy],
        "trained": [round(float(value), 6) for value in state.trained.accuracy],
        "sums": [float(np.float32(leaf.sum())) for leaf in leaves],
        "norms": [float(np.float32(np.linalg.norm(leaf))) for leaf in leaves],
    }


def _fingerprints(names):
    from problems import HYPER_PARAMETERS, tiny_model

    from pfl_jax import simulate

    settings = simulate.Settings(rounds=1)
    return {
        name: fingerprint(simulate.build(METHODS[name](tiny_model(), **HYPER_PARAMETERS), settings).jit())
        for name in names
    }


if __name__ == "__main__":
    import os
    import sys

    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    from pfl_jax.methods import METHODS

    chosen = sys.argv[1:] or METHODS
    stored = json.loads(FILE.read_text()) if FILE.exists() else {}
    stored |= _fingerprints(chosen)
    FILE.write_text(json.dumps({name: stored[name] for name in METHODS if name in stored}, indent=1) + "\n")
    print(f"wrote {', '.join(chosen)} to {FILE}", file=sys.stderr)
