"""Sweeps: every combination of values and seeds, trained together where their programs have one shape.

    python -m experiments.sweep --dataset digits --method fedpac --seeds 4 --grid lam=0.1,1,10 --grid lr=0.02,0.05

`experiments.commands.sweep` has its code and explains it.
"""

from experiments.commands.sweep import main
from experiments.host.exit_codes import exit_process

if __name__ == "__main__":
    exit_process(main())
