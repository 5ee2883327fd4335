"""`python -m experiments DATASET ...` is `python -m experiments.DATASET ...`."""

import sys

from experiments import datasets
from experiments.cli import main

USAGE = f"usage: python -m experiments DATASET [--help] [OPTIONS]\n\nDATASET is one of {', '.join(datasets())}."

if __name__ == "__main__":
    if sys.argv[1:2] in ([], ["-h"], ["--help"]):
        print(USAGE)
    else:
        sys.exit(main(sys.argv[1], sys.argv[2:]))
