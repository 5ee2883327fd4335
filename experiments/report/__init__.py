"""Report on runs as one self-contained HTML page; charts are drawn by `experiments.show`."""
