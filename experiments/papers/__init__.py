"""The papers' published accuracies, and their settings as command lines."""
