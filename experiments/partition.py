"""Partitions as files: the rows of each client, drawn, and exchanged with LEAF and Flower.

    python -m experiments.partition --dataset digits --partition dirichlet --num-clients 10 --to digits.json

`experiments.commands.partition` has its code and explains it.
"""

from experiments.commands.partition import main
from experiments.host.exit_codes import exit_process

if __name__ == "__main__":
    exit_process(main())
