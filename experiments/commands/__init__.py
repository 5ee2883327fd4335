"""Command lines: of one run (`main`), and shared parts of the commands of many runs (`batch`)."""
