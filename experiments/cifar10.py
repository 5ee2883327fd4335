"""CIFAR-10 in groups of clients with common classes: FedPAC (Xu, Tong, Huang. ICLR 2023), Table 1.

    python -m experiments.cifar10 --method fedpac

FedPAC's setting: 20 clients of 600 examples, s = 20 %, all clients in each of 200 rounds.
`--preset fedas` takes FedAS's setting instead (Tables 3 and 4 of its paper).
The paper: 81.13 %.
"""

from experiments.cli.command import main
from experiments.host.exit_codes import exit_process

if __name__ == "__main__":
    exit_process(main("cifar10"))
