"""Entry point: `python -m experiments` lists the commands; `... NAME` runs `python -m experiments.NAME`."""

import ast
import pkgutil
import re
import runpy
import sys
from pathlib import Path

import experiments
from experiments.cli.command import main
from experiments.host.exit_codes import exit_process


def commands() -> dict[str, tuple[str, str]]:
    """Name of each command -> first line and first example of its docstring, read without importing it."""
    found, root = {}, Path(experiments.__path__[0])
    for module in pkgutil.iter_modules([str(root)]):
        path = root / module.name / "__main__.py" if module.ispkg else root / f"{module.name}.py"
        text = path.read_text() if path.exists() else ""
        if module.name != "__main__" and 'if __name__ == "__main__":' in text:
            words = ast.get_docstring(ast.parse(text)) or ""
            example = re.search(r"^ +(python -m [^#\n]*)", words, re.MULTILINE)
            found[module.name] = words.partition("\n")[0], example[1].strip() if example else ""
    return found


def usage() -> str:
    """Usage message with the list of commands."""
    lines = ["usage: python -m experiments NAME [--help] [OPTIONS]"]
    every = commands()
    others = every.keys() - set(experiments.DATASETS)
    for title, names in (
        ("One method on one data set:", experiments.DATASETS),
        ("Many runs, results of runs, and partitions:", sorted(others)),
    ):
        lines += ["", title]
        for name in names:
            lines += [f"  {name:<18} {every[name][0]}", f"  {'':<18} {every[name][1]}"]
    lines += ["", "NAME --help explains the options of a command; for a data set, also the options of its --method."]
    return "\n".join(lines)


if __name__ == "__main__":
    name = next(iter(sys.argv[1:]), "--help")
    if name in ("-h", "--help"):
        print(usage())
    elif name in commands() and name not in experiments.DATASETS:
        sys.argv[:2] = [f"python -m experiments.{name}"]
        runpy.run_module(f"experiments.{name}", run_name="__main__", alter_sys=True)
    else:
        exit_process(main(name, sys.argv[2:]))
