"""Results of a sweep: a table of its settings as text and JSON, and a picture of their curves."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.commands.batch import Job
from experiments.folder import load
from experiments.folder.best_round import phase_summary
from experiments.folder.load import read
from experiments.folder.run_folder import VALIDATION, rounded, strict_json
from experiments.folder.stored_runs import Group, chosen_on, goodness, one_per_method
from experiments.host.console import print_line, print_text
from experiments.show.curves import picture
from experiments.show.pictures import save as save_picture
from experiments.show.tables import Table, with_deviation
from experiments.spec.choices import ALWAYS, FIELD, PROTOCOLS, Protocol
from pfl_jax.atomic_write import write_text
from pfl_jax.errors import InvalidInput
from pfl_jax.primitives.metrics import Transfer

NAME = "sweep"
CHOSEN_ON = {
    VALIDATION: "The best setting has the best {score} on validation examples, by {protocol}; all other columns "
    "are on test examples.",
    "test": "The best setting has the best {score} on test examples, by {protocol}, so its {score} is an "
    "optimistic estimate: --val-fraction 0.1 chooses it on examples set apart.",
}
"""Examples on which the best setting is chosen -> the same in words."""
NO_BEST = "No setting is called the best: {why}."

MOST_NAMES = 3
"""Maximum number of methods that a title names."""


def save(settings: Mapping[str, Sequence[Job]], folder: Path, console: Console) -> None:
    """Print the table of a finished sweep, and save it with its picture: sweep.json, sweep.md, sweep.tex, sweep.csv,
    sweep.png, sweep.svg.

    `settings` are the runs of each setting by its name, one for each seed.
    """
    groups, protocol = _groups(settings)
    if len(axes := list(dict.fromkeys(group.axis for group in groups))) > 1:
        raise InvalidInput(f"no table is made of settings with different scores: {'; '.join(axes)}; all runs are there")
    on, data, config = chosen_on(groups), list(dict.fromkeys(group.data for group in groups)), groups[0].runs[0].config
    score, axis = load.task_of(config)["scores"][0], load.axis(config).replace("%", "percent")
    best = max(groups, key=lambda group: goodness(group, protocol, on))
    if len(data) > 1:
        best, choice = None, NO_BEST.format(why="they are on different data")
    elif goodness(best, protocol, on) == -math.inf:
        best, choice = None, NO_BEST.format(why=f"none has a mean {score}")
    else:
        choice = CHOSEN_ON[on].format(score=score, protocol=protocol)
    values = [{"setting": one.label} | _values(one, protocol, validated=on == VALIDATION) for one in groups]
    when = "of the kept round" if any(one.keeps for one in groups) else "after the last round"
    explained = (
        f"{axis[0].upper()}{axis[1:]} {when}, means over clients (pooled: weighted by their test examples); mean and "
        "deviation over seeds."
    )
    rows = [[_text(value, percent=axis.endswith("percent")) for value in row.values()] for row in values]
    if best is not None:
        rows[groups.index(best)][0] += " (best)"
    heads = [name.replace("_pooled", ", pooled") for name in values[0]]
    table = Table(_title(groups), heads, rows, [*filter(None, [explained, choice, _trials(groups)])])
    console.print(table.terminal())
    for note in table.notes:
        print_text(console, note)
    record = {
        "title": table.title,
        "dataset": groups[0].runs[0].spec.dataset,
        "data_source": "; ".join(data),
        "score": axis,
        "eval_protocol": protocol,
        "best": best and best.label,
        "best_chosen_on": on,
        "settings": values,
    }
    record_path, *paths = (folder / f"{NAME}.{kind}" for kind in ("json", "md", "tex", "csv", "png", "svg"))
    write_text(record_path, strict_json(record))
    table.save(*paths[:3])
    shown = picture(groups, best)
    words = f"Black: the best, chosen on {on} examples, by {protocol}." if best else choice
    save_picture(shown._replace(title=table.title, caption=f"{shown.caption} {words}"), *paths[3:])
    for path in (record_path, *paths):
        print_line(console, f"saved {path}")


def best_of_methods(settings: Mapping[str, Sequence[Job]]) -> list[str]:
    """Names of the best setting of each method on validation examples; `settings` as in `save`."""
    return [group.label for group in one_per_method(*_groups(settings))]


def _groups(settings: Mapping[str, Sequence[Job]]) -> tuple[list[Group], Protocol]:
    """Runs of each setting, and the protocol by which they are compared."""
    protocol = next(iter(settings.values()))[0].spec.eval_protocol
    return [Group(name, tuple(read(job.folder, protocol) for job in jobs)) for name, jobs in settings.items()], protocol


def _trials(groups: Sequence[Group]) -> str:
    """Numbers of settings that were tried for each method; "" for one method, or one setting of each."""
    tried = Counter(group.method for group in groups)
    if len(tried) < 2 or max(tried.values()) == 1:
        return ""
    if len({*tried.values()}) == 1:
        return f"{tried[groups[0].method]} settings of each method."
    return f"Unequal budgets: {', '.join(f'{number} settings of {name}' for name, number in tried.items())}."


def _title(groups: Sequence[Group]) -> str:
    """Methods, data and seeds."""
    methods, seeds = list(dict.fromkeys(group.method for group in groups)), [run.seed for run in groups[0].runs]
    names = ", ".join(methods) if len(methods) <= MOST_NAMES else f"{len(methods)} methods"
    data = "; ".join(dict.fromkeys(group.data for group in groups))
    return f"{names} on {data}, {f'seed {seeds[0]}' if len(seeds) == 1 else f'seeds {seeds[0]} to {seeds[-1]}'}"


def _values(group: Group, main: Protocol, *, validated: bool) -> dict[str, dict[str, Any]]:
    """Column -> record of the values after the last round; on test examples, but for the column "validation"."""
    last, everyone = [run.final for run in group.runs], load.number_of_clients(group.runs[0].config)
    found = {VALIDATION: _record([line[VALIDATION][main] for line in last], "mean", everyone)} if validated else {}
    # Finished runs may have a protocol that was not asked for.
    for protocol in sorted({*ALWAYS, main}, key=lambda name: (name != main, PROTOCOLS.index(name))):
        for average, name in FIELD.items():
            column = protocol if average == "clients" else f"{protocol}_pooled"
            found[column] = _record([line[protocol] for line in last], name, everyone)
    higher = load.task_of(group.runs[0].config)["higher_is_better"]
    over = [phase_summary(run.lines, higher_is_better=higher) for run in group.runs]
    return found | {name: _record(over, name, everyone) for name in Transfer._fields if all(over)}


def _text(value: Any, *, percent: bool) -> str:
    """A setting's name, or its record of a column, as text."""
    if isinstance(value, str):
        return value
    text = with_deviation(value["mean"], value["std"], percent=percent)
    return f"{text} over {value['over']}" if value["over"] else text


def _record(summaries: Sequence[dict[str, Any]], name: str, everyone: int) -> dict[str, Any]:
    """Values, mean and sample standard deviation; None if a run has no value, the latter also for one run; and over how
    many clients they are, see `load.coverage_text`."""
    per_seed: list[float | None] = [one[name] for one in summaries]
    known = [value for value in per_seed if value is not None]
    mean = rounded(statistics.fmean(known)) if len(known) == len(per_seed) else None
    deviation = rounded(statistics.stdev(known)) if mean is not None and len(known) > 1 else None
    return {"mean": mean, "std": deviation, "per_seed": per_seed, "over": load.coverage_text(summaries, everyone)}
