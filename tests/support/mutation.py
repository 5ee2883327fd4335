"""How many of the mistakes in mutants.toml the tests notice. A tool, not a test:

    python tests/support/mutation.py [--out mutation.jsonl] [PART ...]

Makes one mistake after another in a temporary copy of the repository and runs the test that should fail for it. Results
are appended to the file as they come; a second call goes on where the first one ended. Ends with a table by file and
what survived, and fails if anything did. PART: only mistakes whose file or test has it in its name.
"""

import argparse
import collections
import importlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = Path(__file__).with_name("mutants.toml")

COPIED = ("pfl_jax", "experiments", "tests", "docs", "pyproject.toml", "README.md")

BROKEN = ("NameError", "SyntaxError", "ImportError", "IndentationError")
"""A mutant that fails like this is no mistake that anyone could leave in the code."""


class Mutant(NamedTuple):
    """A mistake: `new` in place of the only `old` of the file at `path`, which the test with this node id notices."""

    path: str
    old: str
    new: str
    test: str


def mutants():
    """All of mutants.toml."""
    for file in tomllib.loads(MUTANTS.read_text())["file"]:
        for old, new, *test in file["mutants"]:
            yield Mutant(file["path"], old, new, *test or [file["tests"]])


def _run(root, tests, limit):
    """The exit status of pytest on some tests of the copy at root, None past the limit in seconds; and its output."""
    log = root / "pytest.log"
    child = os.fork()
    if not child:
        os.chdir(root)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        import pytest

        status = 3
        try:
            status = pytest.main(["-n", "0", "-x", "-q", "--tb=short", "-m", "", "-p", "no:cacheprovider", *tests])
        finally:
            os._exit(int(status))
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), log.read_text()
        time.sleep(0.05)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return None, log.read_text()


def outcome(root, mutant, limit):
    """killed, survived, stale or broken, and the last line that says why."""
    file = root / mutant.path
    text = file.read_text() if file.exists() else ""
    if text.count(mutant.old) != 1:
        return "stale", f"{text.count(mutant.old)} places"
    file.write_text(text.replace(mutant.old, mutant.new))
    try:
        status, output = _run(root, [mutant.test], limit)
    finally:
        file.write_text(text)
    telling = re.findall(r"^E +\S.*|.*\b(?:passed|failed|error)\b.*", output, re.MULTILINE)
    why = telling[0] if telling else ""
    if status == 0:
        return "survived", why
    if status not in (1, None) or any(f"{name}:" in output for name in BROKEN):
        return "broken", output[-500:]
    return "killed", "too slow" if status is None else why


def _prepare():
    """A copy of the repository. What tests import is imported here, once, before every child is forked."""
    os.environ |= {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3", "OPENBLAS_NUM_THREADS": "1"}
    os.environ |= {"PFL_JAX_TESTS": f"mutation_{os.getpid()}", "PFL_JAX_KEEP_PROGRAMS": "1"}
    sys.dont_write_bytecode = True
    sys.path = [entry for entry in sys.path if Path(entry).resolve() != MUTANTS.parent]
    root = Path(tempfile.mkdtemp(prefix="mutation_"))
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, root / name)
    for name in ("chex", "flax.linen", "jax", "optax", "pytest", "scipy.optimize", "sklearn.metrics"):
        importlib.import_module(name)
    return root


def report(results):
    """Prints the figures by file and everything that was not killed."""
    by_file = collections.defaultdict(collections.Counter)
    for mutant, (state, _) in results.items():
        by_file[mutant.path][state] += 1
    total = sum(by_file.values(), collections.Counter())
    for path, counts in [*by_file.items(), ("all", total)]:
        print(f"{path:40} {counts['killed']:4} of {counts.total():4}  {100 * counts['killed'] / counts.total():5.1f} %")
    for mutant, (state, why) in results.items():
        if state != "killed":
            print(f"{state}: {mutant.path}: {mutant.old!r} -> {mutant.new!r} under {mutant.test}: {why}")


def main():
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("mutation.jsonl"), help="file of results, a line of JSON each")
    parser.add_argument("--limit", type=float, default=300, help="seconds for one mutant's tests")
    parser.add_argument("parts", nargs="*", help="part of the name of a file or of a test")
    options = parser.parse_args()
    chosen = [
        one
        for one in mutants()
        if not options.parts or any(part in one.path or part in one.test for part in options.parts)
    ]
    results = {}
    for line in options.out.read_text().splitlines() if options.out.exists() else []:
        *mutant, state, why = json.loads(line)
        results[Mutant(*mutant)] = state, why
    results = {mutant: results[mutant] for mutant in chosen if mutant in results}
    root = _prepare()
    try:
        for number, mutant in enumerate(chosen, 1):
            if mutant not in results:
                results[mutant] = outcome(root, mutant, options.limit)
                state = results[mutant][0]
                print(f"[{number}/{len(chosen)}] {state} {mutant.path}: {mutant.old} -> {mutant.new}", flush=True)
                with options.out.open("a") as out:
                    print(json.dumps([*mutant, *results[mutant]]), file=out)
    finally:
        shutil.rmtree(root, ignore_errors=True)
        programs = Path(tempfile.gettempdir()) / f"pfl_jax_tests_{os.environ['PFL_JAX_TESTS']}"
        shutil.rmtree(programs, ignore_errors=True)
    report({mutant: results[mutant] for mutant in chosen})
    sys.exit(any(results[mutant][0] != "killed" for mutant in chosen))


if __name__ == "__main__":
    main()
