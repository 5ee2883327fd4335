"""Results of a sweep: a table of its settings as text and JSON, and a picture of their curves."""

import dataclasses
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.choices import ALWAYS, FIELD, PROTOCOLS, Protocol
from experiments.cli.batch import Job
from experiments.folder import load
from experiments.folder.load import read
from experiments.folder.run_folder import VALIDATION, rounded, strict_json
from experiments.folder.stored_runs import Group
from experiments.host.console import print_line
from experiments.show.curves import chosen_on, goodness, one_per_method, picture
from experiments.show.pictures import save as save_picture
from experiments.show.tables import comma_separated, latex_of_text, markdown, terminal, with_deviation
from pfl_jax.atomic_write import write_text
from pfl_jax.errors import InvalidInput

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
    first = next(iter(settings.values()))[0].cell
    protocol = first.spec().eval_protocol
    groups = [Group(name, tuple(read(job.folder, protocol) for job in jobs)) for name, jobs in settings.items()]
    if len(axes := list(dict.fromkeys(group.axis for group in groups))) > 1:
        raise InvalidInput(f"no table is made of settings with different scores: {'; '.join(axes)}; all runs are there")
    on = chosen_on(groups)
    data = list(dict.fromkeys(group.data for group in groups))
    found = {goodness(group, protocol, on): group for group in reversed(groups)}
    best = found[max(found)] if len(data) == 1 and max(found) > -math.inf else None
    values = {group.label: _values(group, protocol, validated=on == VALIDATION) for group in groups}
    config, title = groups[0].runs[0].config, _title(groups)
    score, axis = load.task_of(config)["scores"][0], load.axis(config).replace("%", "percent")
    no_best = NO_BEST.format(why="they are on different data" if len(data) > 1 else f"none has a mean {score}")
    choice = CHOSEN_ON[on].format(score=score, protocol=protocol) if best else no_best
    caption = (
        f"{axis[0].upper()}{axis[1:]} after the last round, means over clients (pooled: weighted by their test "
        f"examples); mean and deviation over seeds. {choice} {_trials(groups)}".strip()
    )
    heads = ["setting", *(name.replace("_pooled", ", pooled") for name in values[groups[0].label])]
    percent = axis.endswith("percent")
    texts = [[name, *(_text(one, percent=percent) for one in row.values())] for name, row in values.items()]
    if best is not None:
        texts[groups.index(best)][0] += " (best)"
    console.print(terminal(heads, texts, title=title, caption=caption))
    record = {
        "title": title,
        "dataset": first.dataset,
        "data_source": "; ".join(data),
        "score": axis,
        "eval_protocol": protocol,
        "best": best and best.label,
        "best_chosen_on": on,
        "settings": [{"setting": name} | row for name, row in values.items()],
    }
    paths = [folder / f"{NAME}.{kind}" for kind in ("json", "md", "tex", "csv", "png", "svg")]
    write_text(paths[0], strict_json(record))
    write_text(paths[1], f"**{title}**\n\n{markdown(heads, texts)}\n{caption}\n")
    write_text(paths[2], latex_of_text(heads, texts, f"{title}. {caption}"))
    write_text(paths[3], comma_separated([dict(zip(heads, row, strict=True)) for row in texts]))
    shown = picture(groups, best)
    words = f"Black: the best, chosen on {on} examples, by {protocol}." if best else no_best
    save_picture(dataclasses.replace(shown, title=title, caption=f"{shown.caption} {words}"), *paths[4:])
    for path in paths:
        print_line(console, f"saved {path}")


def best_of_methods(settings: Mapping[str, Sequence[Job]]) -> list[str]:
    """Names of the best setting of each method on validation examples; `settings` as in `save`."""
    protocol = next(iter(settings.values()))[0].cell.spec().eval_protocol
    groups = [Group(name, tuple(read(job.folder, protocol) for job in jobs)) for name, jobs in settings.items()]
    return [group.label for group in one_per_method(groups, protocol)]


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
    last, everyone = [run.lines[-1] for run in group.runs], load.number_of_clients(group.runs[0].config)
    found = {VALIDATION: _record([line[VALIDATION][main] for line in last], "mean", everyone)} if validated else {}
    # Finished runs may have a protocol that was not asked for.
    protocols = [name for name in PROTOCOLS if name in ALWAYS or name == main]
    for protocol, average in itertools.product(sorted(protocols, key=lambda name: name != main), FIELD):
        name = protocol if average == "clients" else f"{protocol}_pooled"
        found[name] = _record([line[protocol] for line in last], FIELD[average], everyone)
    return found


def _text(record: dict[str, Any], *, percent: bool) -> str:
    text = with_deviation(record["mean"], record["std"], percent=percent)
    return f"{text} over {record['over']}" if record["over"] else text


def _record(summaries: Sequence[dict[str, Any]], name: str, everyone: int) -> dict[str, Any]:
    """Values, mean and sample standard deviation; None if a run has no value, the latter also for one run; and over how
    many clients they are, see `load.over`."""
    per_seed: list[float | None] = [one[name] for one in summaries]
    known = [value for value in per_seed if value is not None]
    mean = rounded(statistics.fmean(known)) if len(known) == len(per_seed) else None
    deviation = rounded(statistics.stdev(known)) if mean is not None and len(known) > 1 else None
    return {"mean": mean, "std": deviation, "per_seed": per_seed, "over": load.over(summaries, everyone)}
