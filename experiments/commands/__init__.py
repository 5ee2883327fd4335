"""What the commands share: the command line of one run, and that of many."""
