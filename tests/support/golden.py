"""A few rounds of every method on a fixed tiny problem, as numbers that are stored in golden.json.

They catch a change of results that nobody intended. After an intended one
`python tests/support/golden.py` rewrites them, or those of the methods named after it.
"""

import json
from pathlib import Path

import jax
import numpy as np

FILE = Path(__file__).with_name("golden.json")

EXAMPLES = 3
"""Test examples of each client whose log-probabilities are stored."""


def fingerprint(method, engine):
    """Flat numbers by name, after four rounds of three of the four clients, one client after another.

    - `received`: log-probabilities [N, EXAMPLES, K] of what the clients deploy, see `deployed.py`;
    - `losses/...`: the engine's losses [N] under both protocols;
    - `sum/...`, `norm/...`: sum and Euclidean norm of every array of the final state, by its path in the tree.

    Args:
      method: with `problems.tiny_model` and `problems.HYPER_PARAMETERS`.
      engine: of the method.
    """
    from deployed import log_probabilities
    from problems import tiny_federation

    data = tiny_federation()
    state = engine.init(data, jax.random.key(11))
    for _ in range(4):
        state, _ = engine.round(data, state, 3)
    numbers = log_probabilities(method, EXAMPLES, protocols=("received",))(data, state)
    numbers |= {"losses/received": engine.evaluate(data, state).loss, "losses/trained": state.trained.loss}
    for path, leaf in jax.tree_util.tree_leaves_with_path({"server": state.server, "clients": state.clients}):
        name, leaf = jax.tree_util.keystr(path, simple=True, separator="/"), np.asarray(leaf, np.float64)
        numbers |= {f"sum/{name}": leaf.sum(), f"norm/{name}": np.linalg.norm(leaf)}
    return {name: [round(float(value), 5) for value in np.ravel(values)] for name, values in numbers.items()}


def _fingerprints(names):
    from problems import HYPER_PARAMETERS, tiny_model

    from pfl_jax import simulate

    for name in names:
        method = make_method(name, tiny_model(), **HYPER_PARAMETERS)
        yield name, fingerprint(method, simulate.build(method, simulate.Settings(rounds=1)).jit())


def _text(stored):
    """JSON with one line for each name of each method."""
    methods = []
    for method, numbers in stored.items():
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(values)}" for name, values in numbers.items())
        methods.append(f" {json.dumps(method)}: {{\n{lines}\n }}")
    return "{\n" + ",\n".join(methods) + "\n}\n"


if __name__ == "__main__":
    import os
    import sys

    os.environ["JAX_PLATFORMS"] = "cpu"
    # As in conftest.py: compiling is all the work.
    jax.config.update("jax_disable_most_optimizations", True)
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    from pfl_jax.methods import METHODS, make_method

    chosen = sys.argv[1:] or METHODS
    stored = json.loads(FILE.read_text()) if FILE.exists() else {}
    stored |= dict(_fingerprints(chosen))
    FILE.write_text(_text({name: stored[name] for name in METHODS if name in stored}))
    print(f"wrote {', '.join(chosen)} to {FILE}", file=sys.stderr)
