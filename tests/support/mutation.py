"""Which mistakes in what a change touches do tests not notice? A tool, not a test:

    python tests/support/mutation.py TEST ...

cosmic-ray (pip install cosmic-ray) changes operators, numbers and conditions in the committed lines that differ from
main, one after another in a copy of the repository, and runs the tests for each. Prints what survived, and fails if
anything did. Mistakes that no tool makes are in mutants.py.
"""

import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def survivors(tests):
    """Mistakes in the lines that differ from main which none of the tests notices, as diffs."""
    git = ["git", "-C", str(ROOT)]
    differ = [*git, "diff", "--name-only", "main", "--", "pfl_jax", "experiments"]
    changed = subprocess.run(differ, capture_output=True, text=True).stdout.split()
    files = [name for name in changed if name.endswith(".py") and (ROOT / name).exists()]
    if not files:
        sys.exit("no committed line of pfl_jax or experiments differs from main")
    with tempfile.TemporaryDirectory() as folder:
        copy, config, session = (Path(folder) / name for name in ("copy", "config.toml", "session.sqlite"))
        command = shlex.join([sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-m", "", *tests])
        config.write_text(
            f"[cosmic-ray]\nmodule-path = {json.dumps(files)}\ntimeout = 600.0\n"
            f"excluded-modules = []\ntest-command = {json.dumps(command)}\n"
            '[cosmic-ray.distributor]\nname = "local"\n[cosmic-ray.filters.git-filter]\nbranch = "main"\n'
        )
        subprocess.run([*git, "worktree", "add", "--quiet", "--detach", str(copy)], check=True)

        def step(program, *words, **options):
            own = Path(sys.executable).with_name(program)
            return subprocess.run([own, *words], cwd=copy, check=True, text=True, **options)

        try:
            step("cosmic-ray", "init", config, session)
            step("cr-filter-git", "--config", config, session)
            step("cosmic-ray", "exec", config, session)
            lines = step("cosmic-ray", "dump", session, capture_output=True).stdout.splitlines()
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", str(copy)], check=True)
    results = [result for _, result in map(json.loads, lines) if result and result["worker_outcome"] == "normal"]
    survived = [result["diff"] for result in results if result["test_outcome"] == "survived"]
    print(f"{len(results) - len(survived)} of {len(results)} mistakes in {len(files)} files were noticed")
    return survived


if __name__ == "__main__":
    survived = survivors(sys.argv[1:])
    print(*survived, sep="\n")
    sys.exit(bool(survived))
