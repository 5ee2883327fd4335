"""UCI-HAR, six activities of thirty people with a phone, a client for each person; not in a paper.

    python -m experiments.har --data "UCI HAR Dataset" --method fedper

Download the folder or its zip file yourself, see docs/natural.md. 30 clients, a convolutional network over time, 40
rounds.
"""

from experiments.cli.command import main
from experiments.host.exit_codes import exit_process

if __name__ == "__main__":
    exit_process(main("har"))
