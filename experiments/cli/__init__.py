"""Command lines: their words, read and checked; a user's mistake is an InvalidInput."""
