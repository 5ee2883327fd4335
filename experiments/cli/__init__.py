"""Command lines: options, presets, the parser, and what they say of a run."""
