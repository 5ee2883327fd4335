"""Fashion-MNIST in groups of clients with common classes: FedPAC (Xu, Tong, Huang. ICLR 2023), Table 1.

    python -m experiments.fashion_mnist --method fedpac

FedPAC's setting: 20 clients of 600 examples, s = 20 %, all clients in each of 200 rounds.
The paper: 91.83 %.
Here: 91.29 % received.
"""

from experiments.cli.command import main
from experiments.host.exit_codes import exit_process

if __name__ == "__main__":
    exit_process(main("fashion_mnist"))
