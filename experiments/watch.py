"""Seven shoulder exercises of ten people, recorded by their watches; not in a paper.

    pip install seglearn
    python -m experiments.watch --method fedper

10 clients of 215 to 415 windows of two seconds, a convolutional network over time, 20 rounds:
half a minute on two cores.
A perceptron (--model mlp --hidden 64) with a tuned learning rate, three seeds: 89.49 % received; docs/results.md has
all methods.
"""

from experiments.cli.command import main
from experiments.host.exit_codes import exit_process

if __name__ == "__main__":
    exit_process(main("watch"))
