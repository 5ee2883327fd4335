"""CIFAR-100 under Dirichlet label skew: FedAS (Yang, Huang, Ye. CVPR 2024), Table 2.

    python -m experiments.cifar100 --method fedas

FedAS's setting: 20 clients, beta 0.1, a fifth of them in each round, 40 rounds. The algorithm is as printed in the
paper; `--procedure release` follows the released code, as `experiments.tables --paper fedas --table 2` does.
The paper: 52.41 %.
Without CIFAR-100's files, embedded digit pairs of the same shape are used; their accuracy says nothing about CIFAR-100.
"""

from experiments.cli.command import main
from experiments.host.exit_codes import exit_process

if __name__ == "__main__":
    exit_process(main("cifar100"))
