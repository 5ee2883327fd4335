"""Your own data: arrays, a CSV table, images by class, or a Hugging Face dataset; every method, one client or many.

    python -m experiments.custom --data my.csv --label diagnosis --client-column hospital --normalize

Without --client-column a partition divides the rows over clients. By default an MLP, 30 rounds, and the
hyper-parameters of the preset; docs/your-data.md has the formats.
"""

from experiments.cli.command import main
from experiments.host.exit_codes import exit_process

if __name__ == "__main__":
    exit_process(main("custom"))
