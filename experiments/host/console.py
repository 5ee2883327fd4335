"""Lines on the console, printed as they are: neither highlighted nor read as markup."""

from rich.console import Console


def print_line(console: Console, text: str, style: str | None = None) -> None:
    """Print a line, however long.

    Args:
      console: the console.
      text: the line.
      style: style of rich, such as "bold".
    """
    console.print(text, style=style, soft_wrap=True, highlight=False, markup=False)


def print_text(console: Console, text: str, style: str | None = None) -> None:
    """Print a line for people, which a terminal breaks between words; files and pipes get it whole."""
    console.print(text, style=style, soft_wrap=not console.is_terminal, highlight=False, markup=False)


def print_notice(console: Console, text: str) -> None:
    """Print a line that the user should not miss."""
    print_text(console, text, "bold yellow")
