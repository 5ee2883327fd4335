"""Code on pages of the documentation, as it stands."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def blocks(page, language="python"):
    """All blocks of a page in a language, such as docs/tasks.md."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def block(page, marker):
    """The one block of Python on a page with this text in it."""
    (found,) = [text for text in blocks(page) if marker in text]
    return found


def executed(*texts, **names):
    """Names after some code has run, beside those it is given."""
    found = {"__name__": "page"} | names
    for text in texts:
        exec(compile(text, "a page of the documentation", "exec"), found)
    return found


if __name__ == "__main__":
    # The library example of README.md, for a shell that runs it elsewhere.
    print(block("README.md", "simulate.run("))
