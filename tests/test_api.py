"""The public names: all there, loaded when first used, and documented down to their parameters."""

import ast
import contextlib
import functools
import importlib
import inspect
import os
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pfl_jax
from pfl_jax.methods import METHODS

ROOT = Path(pfl_jax.__file__).parent

INTERNAL = {
    "atomic_write",
    "engine.body",
    "fast.conv_general",
    "fast.forms",
    "lapack",
    "messages",
    "safe_read",
    "networks.adapted_layers",
    "networks.passes",
    *(f"networks.torch_{name}" for name in ("graph", "layers", "reading", "reductions", "spatial")),
    "networks.torch_operations",
    "primitives.loops",
    "networks.vit_modules",
    "networks.weights",
    "streams",
    "testing.comparison",
    "wrappers",
    *(f"data.{name}" for name in ("allocation", "checks", "embedded", "idx_and_cifar")),
    *(f"data.{name}" for name in ("pictures", "readers", "specs", "table", "tfds", "tff", "columns")),
    *(f"engine.{name}" for name in ("checks", "cohort", "independent_rows", "remembered")),
    *(f"engine.{name}" for name in ("mapping", "placement", "rounds", "store")),
    *(f"primitives.{name}" for name in ("affinity", "per_example", "simplex_solvers")),
}
"""Modules that are imported by others here, and promise nothing to users."""

FOLDERS = ("data", "deploy", "engine", "fast", "methods", "networks", "primitives", "testing", "wrappers")
MODULES = {path.stem for path in ROOT.glob("*.py")} | {
    f"{folder}.{path.stem}" for folder in FOLDERS for path in (ROOT / folder).glob("*.py") if path.stem != "__init__"
}
PUBLIC = [*sorted(MODULES - INTERNAL - {"__init__"}), "data", "deploy", "methods", "networks", "primitives", "testing"]
DOCUMENTED = [f"pfl_jax.{name}" for name in PUBLIC]

HEAVY = {"jaxopt", "matplotlib", "sklearn", "tensorflow", "tensorflow_datasets"}


def own_members(module):
    """Public functions and classes that a module defines itself, and the public methods of the classes."""
    for name, thing in vars(module).items():
        if name.startswith("_") or getattr(thing, "__module__", None) != module.__name__:
            continue
        if inspect.isclass(thing):
            yield name, thing
            for method, function in vars(thing).items():
                if inspect.isfunction(function) and not method.startswith("_"):
                    yield f"{name}.{method}", function
        elif inspect.isroutine(thing) or hasattr(thing, "__wrapped__"):
            yield name, thing


def test_every_name_is_there_for_programs_and_for_type_checkers():
    for name in pfl_jax.__all__:
        assert getattr(pfl_jax, name) is not None
    assert dir(pfl_jax) == sorted(pfl_jax.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = pfl_jax.nothing
    (typed,) = (node for node in ast.parse(Path(pfl_jax.__file__).read_text()).body if isinstance(node, ast.If))
    imported = {alias.name for node in typed.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert imported == set(pfl_jax.__all__) - {"__version__"}
    assert (ROOT / "py.typed").exists()


def test_every_public_primitive_is_a_name_of_the_package():
    """And no module has the name of one, which would hide it."""
    flat = set(pfl_jax.primitives.__all__)
    modules = [
        importlib.import_module(f"pfl_jax.{name}") for name in PUBLIC if name.startswith(("primitives.", "outputs"))
    ]
    public = {name for module in modules for name, _ in own_members(module) if "." not in name}
    # For dataclasses of the library; and optax's own.
    assert flat == (public - {"register_unchecked"}) | {"projection_simplex"}
    assert not flat & {path.stem for path in (ROOT / "primitives").glob("*.py")}


EACH_FORM_OF_IMPORT = """
import pfl_jax.methods.fedper
import pfl_jax.methods.fedper as renamed
from pfl_jax.methods import fedper as of_package
from pfl_jax.methods.fedper import fedper
from pfl_jax.methods.fedpac_proto import prototype_weights
assert pfl_jax.methods.fedper is renamed is of_package is fedper
"""


def test_each_form_of_import_gives_the_factory():
    subprocess.run([sys.executable, "-c", EACH_FORM_OF_IMPORT], cwd=ROOT.parent, check=True)


FACTORIZED = """
import os, sys, threadpoolctl
def threads(folder):
    return {one["num_threads"] for one in threadpoolctl.threadpool_info() if folder in one["filepath"]}
import numpy
before = threads("numpy.libs")
exec(sys.argv[1])
import pfl_jax.base
import jax
jax.numpy.linalg.cholesky(jax.numpy.eye(2)).block_until_ready()
print(os.environ.get("OPENBLAS_NUM_THREADS"), *threads("scipy.libs"), threads("numpy.libs") == before)
"""
SLOW_FACTORIZATIONS = "scipy was imported before pfl_jax"


@pytest.mark.parametrize(
    ("first", "given", "printed", "warned"),
    [
        ("", "2", "2 2 True", False),
        ("import scipy.linalg", None, "None 1 True", False),
        ("import scipy.linalg; sys.modules['threadpoolctl'] = None", None, None, True),
    ],
)
def test_factorizations_keep_to_one_thread(first, given, printed, warned):
    """More than one in each of XLA's takes a hundred times as long. NumPy's and a value of the user's own stay."""
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    environment |= {} if given is None else {"OPENBLAS_NUM_THREADS": given}
    program = [sys.executable, "-c", FACTORIZED, first]
    done = subprocess.run(program, cwd=ROOT.parent, env=environment, capture_output=True, text=True, check=True)
    assert (SLOW_FACTORIZATIONS in done.stderr) == warned
    assert printed in (None, done.stdout.strip())


def test_importing_the_package_imports_nothing_else():
    code = "import sys, pfl_jax; print(sorted({'jax', 'numpy', 'flax', 'optax'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_heavy_packages_are_imported_inside_functions():
    for path in ROOT.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & HEAVY, path


def undocumented(where, thing):
    """What a docstring should say and doesn't, in words."""
    text = inspect.getdoc(thing)
    if not text:
        return [f"{where} has no docstring"]
    if inspect.isclass(thing):
        section = "Attributes"
        names = [*getattr(thing, "_fields", getattr(thing, "__dataclass_fields__", ()))]
        names = [name for name in names if name not in ("parent", "name")]  # flax's own
    else:
        section = "Args"
        names = [name for name in inspect.signature(thing).parameters if name != "self"]
        # The first argument of every method's factory is what `METHODS` says.
        names = names[1:] if thing in METHODS.values() else names
    listed = re.search(rf"^{section}:\n((?:  .*\n?|\n)*)", text, re.MULTILINE)
    if listed:
        entries = re.findall(r"^  ([\w*]+(?:, \w+)*):", listed.group(1), re.MULTILINE)
        entries = {word.strip("* ") for entry in entries for word in entry.split(",")}
        wrong = entries ^ set(names) if section == "Args" else set(names) - entries
        return [f"{where}: {section} are {sorted(entries)}, not {names}"] if wrong else []
    # A short one may say all of it in a sentence.
    silent = [name for name in names if not re.search(rf"\b{name}\b", text)]
    return [f"{where} says nothing of {silent}"] if silent and inspect.isroutine(thing) else []


@pytest.mark.parametrize("module", DOCUMENTED)
def test_docstrings_say_what_every_argument_is(module):
    module = importlib.import_module(module)
    assert module.__doc__
    members = [(f"{module.__name__}.{name}", thing) for name, thing in own_members(module)]
    if module.__name__.startswith("pfl_jax.methods."):
        # What a method's factory is made of is its own business.
        members = [(where, thing) for where, thing in members if thing in METHODS.values()]
    missing = [words for where, thing in members for words in undocumented(where, thing)]
    assert not missing, "\n".join(missing)


def resolves(module, reference):
    """Whether a dotted name means something, in a module or by itself."""
    for root in (module, pfl_jax):
        with contextlib.suppress(AttributeError):
            functools.reduce(getattr, reference.split("."), root)
            return True
    return pydoc.locate(reference) is not None


@pytest.mark.parametrize("module", DOCUMENTED)
def test_references_in_docstrings_lead_somewhere(module):
    module = importlib.import_module(module)
    # Dotted names only: a single word in backticks may be an argument, an option or a key.
    found = set(re.findall(r"(?<!`)`([A-Za-z_]\w*(?:\.\w+)+)(?:\(\))?`", inspect.getsource(module)))
    assert not [name for name in found if not resolves(module, name)]
