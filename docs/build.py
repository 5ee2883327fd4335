"""Builds the documentation site: `python -m docs.build [FOLDER]`, by default docs/site/. A warning is an error.

The pages are README.md, CONTRIBUTING.md, CHANGELOG.md, docs/*.md and the tutorial; pdoc makes the API reference from
the docstrings. Nothing is downloaded, neither to build the site nor to view it. `python -m http.server -d docs/site`
shows it with its search; index.html also opens without a server.
"""

import functools
import importlib
import inspect
import json
import logging
import os
import re
import shutil
import sys
import tempfile
import typing
import warnings
from pathlib import Path
from typing import Any

import jax
import optax
import pdoc

import pfl_jax

HERE = Path(__file__).parent
ROOT = HERE.parent

PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "docs/tutorial.ipynb": "tutorial.md",
    "docs/data-frame.ipynb": "data-frame.md",
    "LICENSE": "LICENSE.txt",
    "CITATION.cff": "CITATION.cff",
}
"""Files of the repository -> files of the site, where the site has them under another name or outside docs/."""


def build(folder: Path) -> None:
    """Builds the site, beginning with index.html.

    Args:
      folder: replaced if it exists.

    Raises:
      mkdocs.exceptions.Abort: a link without a target, a page outside the navigation, or any other warning.
    """
    # mkdocs-material advertises here what it does not build with yet.
    os.environ.setdefault("NO_MKDOCS_2_WARNING", "true")
    from mkdocs.commands.build import build as build_site
    from mkdocs.config import load_config

    with tempfile.TemporaryDirectory() as name:
        sources = Path(name)
        collect(sources)
        build_api(sources / "api")
        build_site(
            load_config(str(ROOT / "mkdocs.yml"), docs_dir=str(sources), site_dir=str(folder.resolve()), strict=True)
        )


def collect(folder: Path) -> None:
    """Writes the sources of all pages but the API's, with their links as the site has them."""
    shutil.copytree(HERE / "assets", folder / "assets")
    if (HERE / "figures").is_dir():
        shutil.copytree(HERE / "figures", folder / "figures")
    for path in [*HERE.glob("*.md"), *(ROOT / name for name in PAGES)]:
        text = notebook_page(path) if path.suffix == ".ipynb" else path.read_text()
        if path.suffix in (".md", ".ipynb"):
            text = site_links(text, path.parent)
        (folder / PAGES.get(path.relative_to(ROOT).as_posix(), path.name)).write_text(text)


def site_links(text: str, folder: Path) -> str:
    """A page's text with links to files of the repository turned into links to pages of the site.

    Args:
      text: Markdown.
      folder: of the repository, which its links are relative to.
    """

    def site_link(match: re.Match[str]) -> str:
        path = (folder / match[1]).resolve()
        if not path.is_relative_to(ROOT) or not path.is_file():
            return match[0]
        name = path.relative_to(ROOT).as_posix()
        return f"]({PAGES.get(name, name.removeprefix('docs/'))}{match[2] or ''})"

    return re.sub(r"\]\(([^()#]+)(#[^()]*)?\)", site_link, text)


def notebook_page(path: Path) -> str:
    """Markdown of a notebook with its outputs: texts and pictures."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", []):
            shown = output.get("data", {"text/plain": output.get("text", [])})
            if picture := shown.get("image/png"):
                parts.append(f'<img alt="plot of the cell above" src="data:image/png;base64,{picture.strip()}">')
            else:
                parts.append(f"```text\n{''.join(shown['text/plain']).rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def build_api(folder: Path) -> None:
    """Writes the API's pages, beginning with pfl_jax.html."""
    for module in pdoc.extract.walk_specs(["pfl_jax"]):
        _hide_fields(importlib.import_module(module))
    pdoc.docstrings.GOOGLE_LIST_SECTIONS.append("Info")
    _constants_last()
    # pdoc must find all public names loaded.
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


def _constants_last() -> None:
    """Lets a module's page begin with its functions and classes."""
    in_source_order = pdoc.doc.Module.own_members.func

    def own_members(module: Any) -> list[pdoc.doc.Doc[Any]]:
        return sorted(in_source_order(module), key=lambda member: member.kind == "variable")

    pdoc.doc.Module.own_members = functools.cached_property(own_members)
    pdoc.doc.Module.own_members.__set_name__(pdoc.doc.Module, "own_members")


def _hide_fields(module: Any) -> None:
    """Removes what Python writes for the fields of a named tuple: its docstring lists them under Attributes."""
    for _, cls in inspect.getmembers(module, inspect.isclass):
        if issubclass(cls, tuple) and hasattr(cls, "_fields"):
            cls.__new__.__doc__ = ""
            # Annotations that name the class itself, which pdoc looks for outside its module.
            cls.__new__.__annotations__ = typing.get_type_hints(cls)
            for field in cls._fields:
                getattr(cls, field).__doc__ = "@private"


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "site"
    build(target)
    print(target / "index.html")
