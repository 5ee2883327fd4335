"""HTML and SVG from nested calls, which escape every text that is not markup already."""

import html
from collections.abc import Iterable
from typing import TypeAlias


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


Content: TypeAlias = "str | Markup | Iterable[Content] | None"

_EMPTY = {"meta", "col", "br", "rect", "path", "line", "circle", "polyline"}
"""Elements without content."""


def tag(_name: str, /, *content: Content, **attributes: object) -> Markup:
    """Element with attributes and contents.

    Args:
      _name: of the element.
      *content: strings, which are escaped, markup, lists of both; None is nothing.
      **attributes: `class_` is class, `stroke_width` stroke-width; None and False leave one out, True is a bare one.
    """
    words = [_name]
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        # SVG has attributes in camel case and with hyphens, none with underscores.
        name = name.rstrip("_").replace("_", "-")
        words.append(name if value is True else f'{name}="{html.escape(_number(value))}"')
    inner = join(*content)
    if _name in _EMPTY and not inner:
        return Markup(f"<{' '.join(words)}/>")
    return Markup(f"<{' '.join(words)}>{inner}</{_name}>")


def join(*content: Content) -> Markup:
    """Concatenated contents, escaped unless they are markup."""
    parts = []
    for one in content:
        if one is None:
            continue
        if isinstance(one, Markup):
            parts.append(one)
        elif isinstance(one, str):
            parts.append(html.escape(one))
        else:
            parts.append(join(*one))
    return Markup("".join(parts))


def _number(value: object) -> str:
    """Coordinates rounded to a hundredth of a pixel."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
