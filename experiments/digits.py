"""scikit-learn's 1,797 handwritten digits: every method in seconds, no download; not in a paper.

    python -m experiments.digits --method fedpac

20 clients of 60 examples in groups with common classes, an MLP, 40 rounds.
"""

from experiments.cli.exit_codes import leave
from experiments.run.command import main

if __name__ == "__main__":
    leave(main("digits"))
