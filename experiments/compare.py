"""Comparison of finished runs: intervals of differences, clients worse off, methods that cannot be told apart.

    python -m experiments.compare runs/first

`experiments.commands.compare` has its code and explains it.
"""

from experiments.commands.compare import main
from experiments.host.exit_codes import exit_process

if __name__ == "__main__":
    exit_process(main())
