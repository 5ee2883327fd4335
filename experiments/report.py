"""Report of runs as an HTML page, or a picture of their curves.

    python -m experiments.report runs/digits-fedpac-seed0-001

`experiments.commands.report` has its code and explains it.
"""

from experiments.commands.report import main
from experiments.host.exit_codes import exit_process

if __name__ == "__main__":
    exit_process(main())
