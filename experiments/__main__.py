"""Entry point: `python -m experiments NAME ...` runs `python -m experiments.NAME ...`; alone it lists the commands."""

import ast
import pkgutil
import runpy
import sys
import textwrap
from pathlib import Path

import experiments
from experiments.cli.exit_codes import leave
from experiments.run.command import main


def commands() -> dict[str, str]:
    """Commands of `python -m experiments.NAME`: name -> first line of its docstring, read without importing it."""
    found = {}
    for module in pkgutil.iter_modules(experiments.__path__):
        place = Path(experiments.__path__[0], module.name)
        path = place / "__main__.py" if module.ispkg else place.with_suffix(".py")
        text = path.read_text() if path.exists() else ""
        if module.name != "__main__" and 'if __name__ == "__main__":' in text:
            found[module.name] = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    return found


def usage() -> str:
    """Usage message with the list of commands."""
    lines = ["usage: python -m experiments NAME [--help] [OPTIONS]"]
    datasets, every = experiments.DATASETS, commands()
    width = 2 + max(map(len, every))
    for title, names in (
        ("One method on one data set:", datasets),
        ("Other commands:", sorted(every.keys() - set(datasets))),
    ):
        lines += ["", title]
        lines += [
            textwrap.fill(every[name], 100, initial_indent=f"  {name:<{width}}", subsequent_indent=" " * (2 + width))
            for name in names
        ]
    lines += ["", "NAME --help explains its options, for a data set those of the method given by --method too."]
    return "\n".join(lines)


if __name__ == "__main__":
    name = next(iter(sys.argv[1:]), "--help")
    if name in ("-h", "--help"):
        print(usage())
    elif name in commands() and name not in experiments.DATASETS:
        sys.argv[:2] = [f"python -m experiments.{name}"]
        runpy.run_module(f"experiments.{name}", run_name="__main__", alter_sys=True)
    else:
        leave(main(name, sys.argv[2:]))
