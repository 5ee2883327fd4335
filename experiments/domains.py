"""Folders DOMAIN/CLASS/*.png, such as Digit-5, Office-Home or DomainNet: a domain is one client or several.

    python -m experiments.domains --data DIR --num-clients 5 --method fedbn

All pictures must have the same size. FedAvg's network, 100 rounds.
"""

from experiments.cli.command import main
from experiments.host.exit_codes import exit_process

if __name__ == "__main__":
    exit_process(main("domains"))
