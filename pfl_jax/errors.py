"""Exceptions of the library. `InvalidInput` is the base class of all errors that the user can correct."""


class InvalidInput(ValueError):
    """Invalid user input, with a one-line message that says what is wrong and what to do.

    The command line prints the message without a traceback and exits with code 2.
    """


class CannotWrite(InvalidInput):
    """File or folder that cannot be written, for example because the disk is full; its previous content is intact."""


class Diverged(InvalidInput):
    """Loss, model or message that became NaN or infinite.

    Attributes:
      round: number of the round, counted from 1.
      clients: sorted numbers of the clients that diverged; empty if the server's result for finite messages diverged.
    """

    def __init__(self, round: int, clients: list[int]):
        self.round: int = round
        self.clients: list[int] = clients
        what = "what the server computed from finite messages"
        if clients:
            more = f" (and {len(clients) - 1} more)" if len(clients) > 1 else ""
            what = f"the model, message or loss of client {clients[0]}{more}"
        super().__init__(f"round {round}: {what} is NaN or infinite")
