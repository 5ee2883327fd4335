"""Shakespeare, the next character by role: McMahan et al. (AISTATS 2017) and LEAF, with their two LSTM layers.

    python -m experiments.shakespeare --data shakespeare.sqlite.lzma --method fedper

The first 100 of 715 roles in TFF's file, or of LEAF's folder, ten of them in each of 100 rounds. For all roles, give
--num-clients 715. docs/natural.md says where the files are.
"""

from experiments.cli.command import main
from experiments.host.exit_codes import exit_process

if __name__ == "__main__":
    exit_process(main("shakespeare"))
