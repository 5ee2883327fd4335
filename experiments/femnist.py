"""FEMNIST, handwritten digits and letters by writer, with LEAF's network (Caldas et al. 2018); not in a paper here.

    python -m experiments.femnist --data emnist_all.sqlite.lzma --method fedper

The first 100 of 3,400 writers in TFF's file, or of LEAF's folder, ten of them in each of 200 rounds. For all writers,
give --num-clients 3400. docs/natural.md says where the files are.
"""

from experiments.cli.command import main
from experiments.host.exit_codes import exit_process

if __name__ == "__main__":
    exit_process(main("femnist"))
