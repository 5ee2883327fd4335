"""Exceptions of the library; `InvalidInput` means that the user's input was wrong."""


class InvalidInput(ValueError):
    """Invalid user input, with a one-line message: what was wrong and what to do.

    The command line prints the message without a traceback and exits with code 2.
    """


class CannotWrite(InvalidInput):
    """File or folder that cannot be written, as on a full disk; its previous content is intact."""


class Diverged(InvalidInput):
    """Loss, model or message that has become NaN or infinite.

    Attributes:
      round: in which, counted from 1.
      clients: whose, sorted; empty if it is what the server computed from finite messages.
    """

    def __init__(self, round: int, clients: list[int]):
        self.round: int = round
        self.clients: list[int] = clients
        whose = "what the server computed from finite messages"
        if clients:
            more = f" (and {len(clients) - 1} more)" if len(clients) > 1 else ""
            whose = f"the model, message or loss of client {clients[0]}{more}"
        super().__init__(f"round {round}: {whose} is NaN or infinite")
