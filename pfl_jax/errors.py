"""The one exception that means the user's input was wrong."""


class InvalidInput(ValueError):
    """Input that cannot be used, said in one line: what was wrong and what to do.

    The command line prints the message without a traceback and exits with code 2.
    """


class CannotWrite(InvalidInput):
    """A file or a folder cannot be written: the disk is full, or it is not ours. What was there before is whole."""
