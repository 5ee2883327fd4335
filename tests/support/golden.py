"""A few rounds of every method on a fixed tiny problem, as numbers that are stored in golden.json.

They catch a change of results that nobody intended. After an intended one raise the version of the method's results in
its file, and `python tests/support/golden.py NAME` writes the new numbers: results of the old version are then run
again. Without names it does so for all methods. Numbers that agree up to rounding stay as they are.
"""

import hashlib
import json
from pathlib import Path

import jax
import numpy as np

FILE = Path(__file__).with_name("golden.json")

EXAMPLES = 3
"""Test examples of each client whose log-probabilities are stored."""

ROUNDING = {"rtol": 2e-4, "atol": 2e-4}
"""What counts as equal: other machines and refactorings moved no number by more than 5e-6."""

VALUES = {"flute": {"lam": 0.05}, "qffl": {"q": 1.0}}
"""Hyper-parameters in place of defaults with which rounding decides: a head of FLUTE that has come to its simplex goes
on across a kink, and a change of 1e-7 is one of 3e-3 after four rounds, with these values one of 5e-7. Of q-FedAvg the
power is one with which the losses and the norms of the changes both count."""

COHORTS = {"": 3, "all/": 4}
"""Prefix of the numbers' names -> clients in a round, of four."""


def fingerprint(method, engine):
    """Numbers by name, of four rounds with three of four clients and with all: log-probabilities [N, EXAMPLES, K] that
    clients deploy, losses [N], and sum and norm of every array of the final state, by its path.
    """
    from deployed import log_probabilities
    from problems import tiny_federation

    data, deployed, found = tiny_federation(), log_probabilities(method, EXAMPLES, protocols=("received",)), {}
    for prefix, size in COHORTS.items():
        state = engine.init(data, jax.random.key(11))
        for _ in range(4):
            state, _ = engine.round(data, state, size)
        numbers = deployed(data, state)
        numbers |= {"losses/received": engine.evaluate(data, state)["loss"], "losses/trained": state.trained["loss"]}
        for path, leaf in jax.tree_util.tree_leaves_with_path({"server": state.server, "clients": state.clients}):
            name, leaf = jax.tree_util.keystr(path, simple=True, separator="/"), np.asarray(leaf, np.float64)
            numbers |= {f"sum/{name}": leaf.sum(), f"norm/{name}": np.linalg.norm(leaf)}
        found |= {prefix + name: values for name, values in numbers.items()}
    return {name: [round(float(value), 5) for value in np.ravel(values)] for name, values in found.items()}


def moved(stored, got):
    """Name of the first stored numbers from which those of today differ beyond rounding; "" if none do."""
    for name, values in stored.items():
        if len(got.get(name, ())) != len(values) or not np.allclose(got[name], values, **ROUNDING):
            return name
    return ""


def entry(version, numbers):
    """Entry of a method in golden.json: the version, a digest that binds the numbers to it, and the numbers."""
    digest = hashlib.sha256(json.dumps([version, numbers]).encode()).hexdigest()[:12]
    return {"version": version, "digest": digest, **numbers}


def numbers_of(stored):
    """The numbers of a method's entry."""
    return {name: values for name, values in stored.items() if name not in ("version", "digest")}


def renewed(name, stored, got, version):
    """Entry of a method of this version, None so far for a new one, with the numbers of today where any moved.

    Raises:
      SystemExit: they moved, and the version is still the stored one.
    """
    if stored is None:
        return entry(version, got)
    where = moved(numbers_of(stored), got)
    if where and version <= stored["version"]:
        raise SystemExit(f"{name}: {where} is another one: write @method_factory(version={stored['version'] + 1})")
    return entry(version, got if where else got | numbers_of(stored))


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
    # As in every_test.py: compiling is all the work.
    jax.config.update("jax_disable_most_optimizations", True)
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    from problems import HYPER_PARAMETERS, tiny_model

    from pfl_jax import simulate
    from pfl_jax.methods import METHODS, make_method
    from pfl_jax.methods.factories import version_of

    chosen = sys.argv[1:] or METHODS
    stored = json.loads(FILE.read_text()) if FILE.exists() else {}
    for name in chosen:
        method = make_method(name, tiny_model(), **HYPER_PARAMETERS | VALUES.get(name, {}))
        got = fingerprint(method, simulate.build(method, simulate.Settings(rounds=1)).jit())
        stored[name] = renewed(name, stored.get(name), got, version_of(METHODS[name]))
    FILE.write_text(_text({name: stored[name] for name in METHODS if name in stored}))
    print(f"wrote {', '.join(chosen)} to {FILE}", file=sys.stderr)
