"""Published accuracies of the papers, and the papers' settings as command lines."""
