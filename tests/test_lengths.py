"""Files and functions of both packages are short enough to be read in one go."""

import ast
import io
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = [path for package in ("pfl_jax", "experiments") for path in sorted((ROOT / package).rglob("*.py"))]
MOST_LINES, MOST_OF_A_FUNCTION = 350, 50
WITHOUT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def lines_of(node):
    return set(range(node.lineno, node.end_lineno + 1))


def is_docstring(node):
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def function_lengths(text):
    """(name, lines of code) of every function: without its docstring, comments and the functions inside it."""
    code, tree = set(), ast.parse(text)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in WITHOUT_CODE:
            code |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if is_docstring(node):
            code -= lines_of(node)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inside = {one: [each for each in ast.walk(one) if each in functions and each is not one] for one in functions}
    return [(one.name, len(code & lines_of(one) - set().union(*map(lines_of, inside[one])))) for one in functions]


@pytest.mark.parametrize("package", ["pfl_jax", "experiments"])
def test_no_file_and_no_function_is_long(package):
    files = {path: path.read_text() for path in FILES if path.relative_to(ROOT).parts[0] == package}
    long = [f"{path.name}: {lines}" for path, text in files.items() if (lines := text.count("\n")) > MOST_LINES]
    long += [
        f"{path.name}, {name}: {lines}"
        for path, text in files.items()
        for name, lines in function_lengths(text)
        if lines > MOST_OF_A_FUNCTION
    ]
    assert not long
