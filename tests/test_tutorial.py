"""docs/tutorial.ipynb: its code uses what there is (always), and all of it runs in Jupyter (`pytest -m slow`)."""

import ast
import functools
import importlib
import inspect
import json
from pathlib import Path

import pytest

PATH = Path(__file__).parents[1] / "docs/tutorial.ipynb"
CELLS = json.loads(PATH.read_text())["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]


def chain(node):
    """A node's dotted name, ["pfl_jax", "run"] for example; None where it is anything else."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (first := chain(node.value)):
        return [*first, node.attr]
    return None


def test_it_is_stored_without_results():
    assert len({cell["id"] for cell in CELLS}) == len(CELLS)
    for cell in CELLS:
        assert cell["metadata"] == {}
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


def test_its_code_uses_names_and_arguments_that_there_are():
    program = ast.parse("\n".join(CODE))
    given, checked = {}, 0
    for node in program.body:
        if isinstance(node, ast.Import):
            given |= {alias.asname or alias.name: importlib.import_module(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            given |= {alias.name: getattr(module, alias.name) for alias in node.names}
    given = {name: thing for name, thing in given.items() if inspect.getmodule(thing).__name__.startswith("pfl_jax")}
    for node in ast.walk(program):
        names = chain(node.func) if isinstance(node, ast.Call) else chain(node)
        if names and names[0] in given:
            thing = functools.reduce(getattr, names[1:], given[names[0]])
            if isinstance(node, ast.Call):
                places = [None for _ in node.args]
                inspect.signature(thing).bind_partial(*places, **{keyword.arg: None for keyword in node.keywords})
                checked += 1
    assert checked > 10


@pytest.mark.slow
def test_it_runs_in_jupyter():
    import nbclient
    import nbformat

    notebook = nbformat.read(PATH, as_version=4)
    nbformat.validate(notebook)
    # Begins where Jupyter does: in the notebook's folder.
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(PATH.parent)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
    assert not [output for output in outputs if output.get("name") == "stderr"]
