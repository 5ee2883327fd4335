"""Prints the library example of README.md, for a shell that runs it elsewhere."""

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def quickstart() -> str:
    """The one Python block of README.md that runs a federation."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (found,) = [block for block in blocks if "simulate.run(" in block]
    return found


if __name__ == "__main__":
    print(quickstart())
