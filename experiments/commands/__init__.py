"""Code that commands share, and their results; the commands themselves are modules of `experiments`."""
