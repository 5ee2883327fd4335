"""Stack Overflow, tags of questions and answers by user: Reddi et al. (ICLR 2021), with their logistic regression.

    python -m experiments.stackoverflow_tags --data stackoverflow.sqlite.lzma --method fedavg

The first 100 users of TFF's file with at most 500 training examples each; ten of them in each of 100 rounds.
docs/natural.md says where the file is.
"""

from experiments.cli.command import main
from experiments.host.exit_codes import exit_process

if __name__ == "__main__":
    exit_process(main("stackoverflow_tags"))
