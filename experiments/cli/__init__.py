"""Command lines: options, presets, the parser, and what they say of a run; a user's mistake is an InvalidInput."""
