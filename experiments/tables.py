"""Tables of the papers: every run of a table, each in its folder, and the table with our results beside the paper's.

    python -m experiments.tables --paper fedpac --table 1 --dataset fashion_mnist --clients 20 --seeds 3

`experiments.commands.tables` has its code and explains it.
"""

from experiments.commands.tables import main
from experiments.host.exit_codes import exit_process

if __name__ == "__main__":
    exit_process(main())
