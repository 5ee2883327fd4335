"""The one exception that means the user's input was wrong."""


class InvalidInput(ValueError):
    """Input that cannot be used, said in one line: what was wrong and what to do.

    The command line prints the message without a traceback and exits with code 2.
    """


class CannotWrite(InvalidInput):
    """A file or a folder cannot be written: the disk is full, or it is not ours. What was there before is whole."""


class Diverged(InvalidInput):
    """A loss, a model or a message has become NaN or infinite.

    Attributes:
      round: in which, counted from 1.
      clients: whose, sorted; empty if it is what the server computed from finite messages.
    """

    def __init__(self, round: int, clients: list[int]):
        self.round, self.clients = round, clients
        whose = "what the server computed from finite messages"
        if clients:
            more = f" (and {len(clients) - 1} more)" if len(clients) > 1 else ""
            whose = f"the model, message or loss of client {clients[0]}{more}"
        super().__init__(f"round {round}: {whose} is NaN or infinite")
