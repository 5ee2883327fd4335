"""UCI-HAR, six activities of thirty people with a phone, each a client; not in a paper.

    python -m experiments.har --data "UCI HAR Dataset" --method fedper

Download it yourself, see docs/natural.md: the folder, or the zip file with it. 30 clients, a convolutional network over
the time, 40 rounds.
"""

from experiments.cli.command import main
from experiments.host.exit_codes import exit_process

if __name__ == "__main__":
    exit_process(main("har"))
