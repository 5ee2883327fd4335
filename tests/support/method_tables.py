"""Tables of docs/tasks.md, privacy.md, robustness.md, wrappers.md, methods.md and methods-at-a-glance.md, from what
methods say, and the line "Trees" of methods' docstrings; run it to write them anew."""

import inspect
import re
import sys
import textwrap
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import jax
from message_shapes import message_shapes
from problems import HYPER_PARAMETERS, tiny_model
from wrapped import NO_OPTION, OPTIONS
from wrapped import refusal as refusal_of_wrapper

from experiments.folder.stored_runs import value_text
from pfl_jax import InvalidInput, Mean
from pfl_jax.messages import has_means, is_mean, may_change
from pfl_jax.methods import METHODS, make_method
from pfl_jax.methods.factories import arguments, on_linear_model
from pfl_jax.tasks import TASKS
from pfl_jax.testing import state_trees


def refusal(name, task):
    """Why a method does not take a task; "" if it does."""
    try:
        make_method(name, tiny_model(task), **HYPER_PARAMETERS)
    except InvalidInput as error:
        return str(error)
    return ""


def _tasks(name):
    refusals = [refusal(name, task) for task in TASKS.values()]
    reasons = {text.partition(f"{task}: ")[2] for task, text in zip(TASKS, refusals, strict=True) if text}
    return [*("" if text else "runs" for text in refusals), "; ".join(reasons)]


def _privacy(name):
    privacy = on_linear_model(METHODS[name], {}).privacy
    examples = f"refused: {privacy.refused}" if privacy.refused else "; ".join(privacy.examples) or "nothing"
    return [examples, "no such option" if privacy.clients is None else "; ".join(privacy.clients) or "nothing"]


def _received(name):
    _, _, message, flags = message_shapes(name)
    if not has_means(message):
        return ["no `Mean`"] * 3
    parts = {True: {}, False: {}, "exact": {}}

    def note(path, part, flags):
        if is_mean(part):
            for inner, flag in jax.tree_util.tree_leaves_with_path(flags):
                whole = path if isinstance(flags, Mean) else (*path, *inner)
                names = [key.name for key in whole if isinstance(key, jax.tree_util.GetAttrKey)]
                parts[flag if may_change(part) else "exact"][f"`{names[0]}`" if names else "all"] = None

    jax.tree_util.tree_map_with_path(note, message, flags, is_leaf=is_mean)
    cells = [", ".join(names) or "nothing" for names in parts.values()]
    return ["all" if cells.count("nothing") == 2 and cell != "nothing" else cell for cell in cells]


def _wrappers(name):
    refusals, reasons = {option: refusal_of_wrapper(name, option) for option in OPTIONS}, {}
    for option, text in refusals.items():
        if text and text != NO_OPTION:
            # Without the names of wrapper and method, and without a hint.
            _, found, rest = text.partition("for methods")
            reason = f"only {found}{rest.partition(':')[0]}" if found else text.partition(": ")[2]
            reasons.setdefault(reason, []).append(f"`{option}`")
    words = [f"{', '.join(options)}: {reason}" for reason, options in reasons.items()]
    cells = ["no option" if text == NO_OPTION else "refused" if text else "yes" for text in refusals.values()]
    return [*cells, "; ".join(words)]


def _at_a_glance(name):
    # What is shared and the source are written on the page itself.
    (written,) = re.findall(
        rf"^\| `{name}` \| ([^|]*?) \| ([^|]*?) \|", page("methods-at-a-glance").read_text(), re.MULTILINE
    )
    own = [f"`{one.name}` {value_text(one.default)}" for one in arguments(METHODS[name]).values()]
    return [*written, ", ".join(own) or "—"]


def _states(name):
    return [*state_trees(METHODS[name])]


TABLES = {
    "methods": (["state of the server", "state of a client"], _states, None),
    "methods-at-a-glance": (["what is shared", "source", "own options and their defaults"], _at_a_glance, None),
    "tasks": ([*TASKS, "otherwise"], _tasks, [*["runs"] * len(TASKS), ""]),
    "robustness": (["received", "not received", "exact"], _received, ["all", "nothing", "nothing"]),
    "wrappers": ([*(f"`{option}`" for option in OPTIONS), "refused: why"], _wrappers, None),
    "privacy": (
        ["examples: not covered", "clients: not covered"],
        _privacy,
        ["number of examples: weight of the client in the mean", "nothing"],
    ),
}
"""Page -> headings after the method's, the cells of a method, and those of most methods, which have no row."""


def page(name):
    """The page's file."""
    return Path(__file__).parents[2] / "docs" / f"{name}.md"


def renewed(name):
    """The page's text with the table of this version."""
    columns, cells, usual = TABLES[name]
    heading = f"| method | {' | '.join(columns)} |\n|{' --- |' * (len(columns) + 1)}\n"
    before, found, rest = page(name).read_text().partition(heading)
    assert found
    lines = rest.splitlines(keepends=True)
    after = next((index for index, line in enumerate(lines) if not line.startswith("|")), len(lines))
    found = {method: cells(method) for method in METHODS}
    rows = [
        f"| {' | '.join([f'`{method}`', *row])} |\n".replace("  ", " ") for method, row in found.items() if row != usual
    ]
    return before + heading + "".join([*rows, *lines[after:]])


def source(name):
    """File of a method's factory."""
    return Path(inspect.getsourcefile(inspect.unwrap(METHODS[name])))


def with_trees(name):
    """Text of this file, whose docstring of the factory has the trees of the method's states at the end of Returns."""
    before, found, rest = source(name).read_text().partition(f"\ndef {name}(")
    upto, returns, rest = rest.partition("\n    Returns:\n")
    assert found
    assert returns
    # To the next section, or to the end of the docstring.
    section, blank, rest = re.split(r'(\n\n|\n    """)', rest, maxsplit=1)
    section = section.partition("\n      Trees: ")[0]
    trees = "Trees: server {}; client {}.".format(*state_trees(METHODS[name]))
    lines = textwrap.wrap(trees, 114, break_long_words=False, break_on_hyphens=False)
    return before + found + upto + returns + "\n      ".join([section, *lines]) + blank + rest


if __name__ == "__main__":
    for method in METHODS:
        source(method).write_text(with_trees(method))
    for table in TABLES:
        page(table).write_text(renewed(table))
