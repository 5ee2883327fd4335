"""Errors of the library, and the words of their messages."""

import ast
import copy
import os
import pickle
from pathlib import Path

import pytest

from pfl_jax import Diverged, InvalidInput
from pfl_jax.atomic_write import append_line, write_binary, write_text
from pfl_jax.errors import CannotWrite, first_line, one_line, shortened


@pytest.mark.parametrize("clients", [[2, 5], []])
def test_a_divergence_can_be_sent_to_another_process_and_copied(clients):
    error = Diverged(3, clients)
    error.add_note("lr 9")
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is Diverged
        assert (str(other), other.round, other.clients) == (str(error), 3, clients)
        assert other.__notes__ == ["lr 9"]


def test_an_error_is_told_in_one_line_of_limited_length():
    assert first_line(InvalidInput("one\ntwo")) == "one"
    assert first_line(InvalidInput()) == ""
    assert one_line(ValueError(" one\n  two")) == "one two"
    assert one_line(ValueError()) == "ValueError"
    assert shortened("a" * 200) == "a" * 200
    assert shortened("a" * 201) == "a" * 197 + "..."
    assert len(first_line("a" * 900)) == 200
    assert len(one_line("a" * 900)) == 300


def test_a_line_that_cannot_be_appended_is_told(tmp_path, full_disk):
    log = tmp_path / "log"
    append_line(log, "first")
    with full_disk(20), pytest.raises(CannotWrite, match=r"cannot write .*log: File too large; make room"):
        append_line(log, "second" * 10)
    assert log.read_text().startswith("first\n")
    with pytest.raises(CannotWrite, match="/dev/full: No space left on device; make room"):
        append_line(Path("/dev/full"), "line")


def test_a_file_that_cannot_be_written_is_as_it_was(tmp_path, full_disk):
    path = tmp_path / "file"
    write_text(path, "old")
    with full_disk(10), pytest.raises(CannotWrite, match="make room"):
        write_text(path, "new" * 10)

    def interrupted(file):
        file.write(b"new")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_binary(path, interrupted)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    with pytest.raises(CannotWrite, match="No such file or directory; give a folder that can be written"):
        write_text(tmp_path / "absent" / "file", "new")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/null", path)])
def test_only_a_file_is_replaced(tmp_path, make):
    make(tmp_path / "file")
    with pytest.raises(CannotWrite, match="file: It is not a regular file"):
        write_text(tmp_path / "file", "content")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert not (tmp_path / "file").is_file()


ROOT = Path(__file__).parents[1]

SWALLOWED = {
    ("pfl_jax/engine/checkpoint.py", "newest"): "a damaged checkpoint is told where no other one can be read",
    ("pfl_jax/engine/independent_rows.py", "_are_independent"): "the first round raises it again",
    ("pfl_jax/testing/__init__.py", "_message"): "another error is reported, with less about it",
    ("pfl_jax/methods/factories.py", "recipes_of"): "a method that cannot be asked has fewer options",
    ("pfl_jax/privacy.py", "budgets"): "the budget is unknown, and says what was raised",
    ("experiments/host/exit_codes.py", "_end"): "nothing may keep a process that is being ended",
    ("experiments/host/distributed.py", "synchronized"): "it is raised when the other processes know it",
    ("experiments/host/distributed.py", "work_with_others"): "it is printed, and ends the process",
}
"""Function that goes on after any exception -> why."""


def _catches_all(kind):
    names = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(name is None or getattr(name, "id", "") in ("Exception", "BaseException") for name in names)


def _swallows(node):
    """Whether a statement goes on after any exception: a handler without a raise, or contextlib.suppress."""
    if isinstance(node, ast.ExceptHandler):
        return _catches_all(node.type) and not any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
    if not isinstance(node, ast.Call) or not any(map(_catches_all, node.args)):
        return False
    return "suppress" in (getattr(node.func, "attr", ""), getattr(node.func, "id", ""))


def test_no_exception_is_swallowed_without_a_reason():
    found = set()
    for path in [one for name in ("pfl_jax", "experiments") for one in (ROOT / name).rglob("*.py")]:
        if "lab" in path.parts:
            continue

        def visit(node, function, path=path):
            for child in ast.iter_child_nodes(node):
                if _swallows(child):
                    found.add((path.relative_to(ROOT).as_posix(), function))
                visit(child, child.name if isinstance(child, ast.FunctionDef) else function)

        visit(ast.parse(path.read_text()), "")
    assert found == SWALLOWED.keys()
