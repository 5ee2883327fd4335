"""Published accuracies of the papers, and their settings as command lines."""
