"""How many mistakes the tests notice. A tool, not a test:

    python tests/support/mutation.py --changed TEST ...            # mistakes in what a change touches
    python tests/support/mutation.py [--out mutation.jsonl] [PART ...]    # those of mutants.toml

The first has cosmic-ray (pip install cosmic-ray) change operators, numbers and conditions in the committed lines that
differ from main, one after another in a copy of the repository, and runs the tests for each; it prints what survived.

The second makes the mistakes that no tool makes, and runs for each the test that should fail. Results are appended to
the file as they come; a second call goes on where the first one ended. PART: only mistakes whose file or test has it in
its name. Both fail if a mistake survived.
"""

import argparse
import collections
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
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
    return [Mutant(*mutant) for mutant in tomllib.loads(MUTANTS.read_text())["mutants"]]


def survivors_of_the_change(tests):
    """Mistakes in the lines that differ from main, made by cosmic-ray, that some tests do not notice, as diffs."""
    git = ["git", "-C", str(ROOT)]
    changed = subprocess.run([*git, "diff", "--name-only", "main", "--", *COPIED[:2]], capture_output=True, text=True)
    files = [name for name in changed.stdout.split() if name.endswith(".py") and (ROOT / name).exists()]
    if not files:
        sys.exit("no committed line of pfl_jax or experiments differs from main")
    with tempfile.TemporaryDirectory() as folder:
        copy, config = Path(folder) / "copy", Path(folder) / "config.toml"
        command = shlex.join([sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-m", "", *tests])
        config.write_text(
            f"[cosmic-ray]\nmodule-path = {json.dumps(files)}\ntimeout = 600.0\n"
            f"excluded-modules = []\ntest-command = {json.dumps(command)}\n"
            '[cosmic-ray.distributor]\nname = "local"\n[cosmic-ray.filters.git-filter]\nbranch = "main"\n'
        )
        subprocess.run([*git, "worktree", "add", "--quiet", "--detach", str(copy)], check=True)
        session, tools = str(Path(folder) / "session.sqlite"), Path(sys.executable).parent
        try:
            for step in (
                ["cosmic-ray", "init", str(config), session],
                ["cr-filter-git", "--config", str(config), session],
                ["cosmic-ray", "exec", str(config), session],
            ):
                subprocess.run([str(tools / step[0]), *step[1:]], cwd=copy, check=True)
            report = [str(tools / "cosmic-ray"), "dump", session]
            lines = subprocess.run(report, cwd=copy, check=True, capture_output=True, text=True).stdout.splitlines()
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", str(copy)], check=True)
    results = [result for _, result in map(json.loads, lines) if result and result["worker_outcome"] == "normal"]
    survived = [result["diff"] for result in results if result["test_outcome"] == "survived"]
    print(f"{len(results) - len(survived)} of {len(results)} mistakes in {len(files)} files were noticed")
    return survived


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
    parser.add_argument("--changed", action="store_true", help="mistakes in what differs from main; PART are tests")
    parser.add_argument("parts", nargs="*", help="part of the name of a file or of a test")
    options = parser.parse_args()
    if options.changed:
        survived = survivors_of_the_change(options.parts)
        print(*survived, sep="\n")
        sys.exit(bool(survived))
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
