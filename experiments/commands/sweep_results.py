"""Results of a sweep: a table of its settings as text and JSON, and a picture of their curves."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.commands.batch import Job
from experiments.folder.load import read
from experiments.folder.run_folder import VALIDATION, rounded, strict_json
from experiments.folder.stored_runs import NOTHING, Group, Mean, chosen_on, goodness
from experiments.host.console import print_line, print_text
from experiments.show.curves import picture
from experiments.show.pictures import save as save_picture
from experiments.show.tables import Table
from experiments.spec.choices import ALWAYS, FIELD, Protocol
from pfl_jax.atomic_write import write_text
from pfl_jax.errors import InvalidInput

NAME = "sweep"

MOST_NAMES = 3
"""Maximum number of methods that a title names."""


def save(settings: Mapping[str, Sequence[Job]], folder: Path, console: Console) -> list[Group]:
    """Print the table of a finished sweep, and save it with its picture: sweep.json, sweep.md, sweep.tex, sweep.csv,
    sweep.png, sweep.svg.

    `settings` maps the name of a setting to its runs, one for each seed. Returns these runs, loaded.
    """
    protocol = next(iter(settings.values()))[0].spec.eval_protocol
    groups = [Group(name, tuple(read(job.folder, protocol) for job in jobs)) for name, jobs in settings.items()]
    if len(axes := list(dict.fromkeys(group.first.axis for group in groups))) > 1:
        raise InvalidInput(f"settings with different scores have no common table: {'; '.join(axes)}; all runs are kept")
    first, on, data = groups[0].first, chosen_on(groups), list(dict.fromkeys(group.first.data for group in groups))
    score, axis = first.task["scores"][0], first.axis.replace("%", "percent")
    best = max(groups, key=lambda group: goodness(group, protocol, on))
    if len(data) > 1:
        best, choice = None, "No setting is called the best: they are on different data."
    elif goodness(best, protocol, on) == -math.inf:
        best, choice = None, f"No setting is called the best: none has a mean {score}."
    elif on == VALIDATION:
        choice = f"The best setting has the best {score} on validation examples, by {protocol}; "
        choice += "all other columns are on test examples."
    else:
        choice = f"The best setting has the best {score} on test examples, by {protocol}, so its {score} is an "
        choice += "optimistic estimate: --val-fraction 0.1 chooses it on examples set apart."
    when = "of the kept round" if any(one.keeps for one in groups) else "after the last round"
    explained = (
        f"{axis[0].upper()}{axis[1:]} {when}, means over clients (pooled: weighted by their test examples); mean and "
        "deviation over seeds, none where a seed diverged."
    )
    columns = [_columns(group, protocol, validated=on == VALIDATION) for group in groups]
    rows = [
        [
            group.label + " (best)" * (group is best),
            *(_text(*value, percent="%" in first.axis) for value in values.values()),
        ]
        for group, values in zip(groups, columns, strict=True)
    ]
    heads = ["setting", *(name.replace("_pooled", ", pooled") for name in columns[0])]
    table = Table(_title(groups, data), heads, rows, [*filter(None, [explained, choice, _trials(groups)])])
    console.print(table.terminal())
    for note in table.notes:
        print_text(console, note)
    record = {
        "title": table.title,
        "dataset": first.spec.dataset,
        "data_source": "; ".join(data),
        "score": axis,
        "eval_protocol": protocol,
        "best": best and best.label,
        "best_chosen_on": on,
        "settings": [
            {"setting": group.label} | {name: _record(*value) for name, value in values.items()}
            for group, values in zip(groups, columns, strict=True)
        ],
    }
    record_path, *paths = (folder / f"{NAME}.{kind}" for kind in ("json", "md", "tex", "csv", "png", "svg"))
    write_text(record_path, strict_json(record))
    table.save(*paths[:3])
    shown = picture(groups, best)
    words = f"Black: the best, chosen on {on} examples, by {protocol}." if best else choice
    save_picture(shown._replace(title=table.title, caption=f"{shown.caption} {words}"), *paths[3:])
    for path in (record_path, *paths):
        print_line(console, f"saved {path}")
    return groups


def _columns(group: Group, main: Protocol, *, validated: bool) -> dict[str, tuple[Mean, str]]:
    """Column -> mean of the results, and the number of its clients; all but "validation" are on test examples."""
    found = {VALIDATION: (group.mean(main, on=VALIDATION), group.coverage(main, on=VALIDATION))} if validated else {}
    # Finished runs may have a protocol that was not asked for.
    for protocol in dict.fromkeys((main, *ALWAYS)):
        for average, name in FIELD.items():
            column = protocol if average == "clients" else f"{protocol}_pooled"
            found[column] = group.mean(protocol, name), group.coverage(protocol)
    return found | {name: (mean, "") for name, mean in group.phases().items()}


def _text(mean: Mean, over: str, *, percent: bool) -> str:
    text = mean.text(percent=percent) or NOTHING
    return f"{text} over {over}" if over else text


def _record(mean: Mean, over: str) -> dict[str, Any]:
    numbers = {"mean": mean.value, "std": mean.deviation}
    known = {name: None if value is None else rounded(value) for name, value in numbers.items()}
    return known | {"per_seed": [*mean.per_seed.values()], "over": over}


def _trials(groups: Sequence[Group]) -> str:
    """Numbers of settings that were tried for each method; "" for one method, or one setting of each."""
    tried = Counter(group.method for group in groups)
    if len(tried) < 2 or max(tried.values()) == 1:
        return ""
    if len({*tried.values()}) == 1:
        return f"{tried[groups[0].method]} settings of each method."
    return f"Unequal budgets: {', '.join(f'{number} settings of {name}' for name, number in tried.items())}."


def _title(groups: Sequence[Group], data: Sequence[str]) -> str:
    methods, seeds = list(dict.fromkeys(group.method for group in groups)), [run.seed for run in groups[0].runs]
    names = ", ".join(methods) if len(methods) <= MOST_NAMES else f"{len(methods)} methods"
    words = f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}"
    return f"{names} on {'; '.join(data)}, {words}"
