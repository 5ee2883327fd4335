"""The folder that a run leaves: written, and read again."""
