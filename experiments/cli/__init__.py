"""Parsing and checking of command lines; a user's mistake is an InvalidInput."""
