"""Texts of options: entries in the sections of a Google docstring, and docstrings after the fields of a class."""

import ast
import functools
import inspect
import itertools
import re
import sys
from pathlib import Path
from typing import Any


def summary(entity: Any) -> str:
    """First line of a docstring; "" without one."""
    return inspect.cleandoc(entity.__doc__ or "").partition("\n")[0]


def entries(entity: Any, *sections: str) -> dict[str, str]:
    """Name -> text of each entry in some sections of a docstring, such as "Args"."""
    found: dict[str, list[str]] = {}
    indent, inside, text = 0, False, []
    for line in filter(str.strip, inspect.cleandoc(entity.__doc__ or "").splitlines()):
        depth = len(line) - len(line.lstrip())
        if depth == 0:
            inside, indent = line.rstrip().removesuffix(":") in sections, 0
        elif inside:
            indent = indent or depth
            entry = re.match(r"([^:]+?)(?: \([^)]*\))?: *(.*)", line.strip()) if depth == indent else None
            if entry:
                text = [entry[2]]
                found |= dict.fromkeys(entry[1].split(", "), text)
            else:
                text.append(line.strip())
    return {name: " ".join(text) for name, text in found.items()}


@functools.cache
def field_texts(kind: type) -> dict[str, str]:
    """Name -> docstring after each field of a class and of those that it inherits from."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__[:-1]):
        module = sys.modules[one.__module__]
        tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
        body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == one.__name__)
        for field, after in itertools.pairwise(body):
            match field, after:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    found[name] = " ".join(text.split())
    return found
