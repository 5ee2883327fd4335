"""EMNIST, 62 classes by digits, upper and lower case: FedPAC (Xu, Tong, Huang. ICLR 2023), Table 1.

    python -m experiments.emnist --method fedpac

FedPAC's setting: 20 clients of 1000 examples, s = 20 %, all clients in each of 200 rounds.
The paper: 86.46 %.
"""

from experiments.cli.command import main
from experiments.host.exit_codes import exit_process

if __name__ == "__main__":
    exit_process(main("emnist"))
