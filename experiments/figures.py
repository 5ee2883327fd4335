"""Figures of the papers: run all runs of a figure, each in its folder, and write it as PNG, SVG and JSON.

    python -m experiments.figures --paper fedpac --figure 2

`experiments.commands.figures` has its code and explains it.
"""

from experiments.commands.figures import main
from experiments.host.exit_codes import exit_process

if __name__ == "__main__":
    exit_process(main())
