"""Run folders: writing and reading."""
