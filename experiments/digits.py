"""scikit-learn's 1,797 handwritten digits: every method in seconds, no download; not in a paper.

    python -m experiments.digits --method fedpac

20 clients of 60 examples in groups with common classes, an MLP, 40 rounds.
"""

from experiments.cli.command import main
from experiments.host.exit_codes import exit_process

if __name__ == "__main__":
    exit_process(main("digits"))
