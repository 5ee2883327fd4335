"""Former name of `python -m experiments.DATASET --preset fedas --method fedas --procedure release`, which it runs.

python -m experiments.lab.fedas_ablation.released fashion_mnist --participation 0.2 --out runs/released
"""

import sys
from collections.abc import Sequence

from experiments.cli.exit_codes import leave
from experiments.run.command import main as run


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code, see `exit_codes.exit_code`."""
    dataset, *rest = (sys.argv[1:] if words is None else list(words)) or ["--help"]
    if dataset in ("-h", "--help"):
        print(__doc__)
        return 0
    return run(dataset, ["--preset", "fedas", "--method", "fedas", "--procedure", "release", *rest])


if __name__ == "__main__":
    leave(main())
