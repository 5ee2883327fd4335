"""Code that commands share, and the results that they make; each command is a file of its name above."""
