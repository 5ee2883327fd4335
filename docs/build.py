"""Builds the API's pages into docs/api/: `python -m docs.build [FOLDER]`. A warning is an error."""

import importlib
import inspect
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import optax
import pdoc

import pfl_jax

HERE = Path(__file__).parent


def build(folder: Path) -> None:
    """Writes the pages, beginning with pfl_jax.html.

    Args:
      folder: made if need be; pages that are there are replaced.
    """
    for module in pdoc.extract.walk_specs(["pfl_jax"]):
        _hide_fields(importlib.import_module(module))
    # All public names are there before pdoc looks for them.
    for name in pfl_jax.__all__:
        getattr(pfl_jax, name)
    # Signatures show the names that people import, not where their packages keep them.
    jax.Array.__qualname__ = "Array"
    jax.sharding.Mesh.__module__ = "jax.sharding"
    optax.GradientTransformation.__module__ = "optax"
    pdoc.render.configure(docformat="google", template_directory=HERE / "theme", footer_text=f"{pfl_jax.__version__}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pdoc.pdoc("pfl_jax", output_directory=folder)


def _hide_fields(module: Any) -> None:
    """Takes away what Python writes for each named tuple: its fields stand under Attributes already."""
    for _, cls in inspect.getmembers(module, inspect.isclass):
        if issubclass(cls, tuple) and hasattr(cls, "_fields"):
            cls.__new__.__doc__ = ""
            for field in cls._fields:
                cls.__dict__[field].__doc__ = "@private"


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "api"
    build(target)
    print(target / "pfl_jax.html")
