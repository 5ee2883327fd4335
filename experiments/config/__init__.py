"""Options, presets and the command line of a run, checked."""
