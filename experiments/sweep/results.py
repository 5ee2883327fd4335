"""Results of a sweep: a table of its settings as text and JSON, and a picture of their curves."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from experiments.cli.cell import Cell
from experiments.cli.measures import ALWAYS, AVERAGES, PROTOCOLS, Average, Protocol
from experiments.cli.own_code import label
from experiments.folder import load
from experiments.folder.run_folder import VALIDATION, rounded, strict_json
from experiments.folder.stored_runs import mean_and_deviation
from experiments.host.console import print_line
from experiments.show.pictures import ROUND, Lines, Picture, over_seeds
from experiments.show.selection import MOST_LINES
from experiments.show.tables import NOTHING, markdown, terminal
from pfl_jax.atomic_write import write_text

NAME = "sweep"
CAPTION = (
    "{axis} after the last round, means over clients (pooled: over all their test examples); mean and "
    "deviation over seeds."
)
CHOSEN_ON = {
    VALIDATION: "The best setting has the best {score} on validation examples, by {protocol}; all other columns "
    "are on test examples.",
    "test": "The best setting has the best {score} on test examples, by {protocol}, so its {score} is an "
    "optimistic estimate: --val-fraction 0.1 chooses it on examples set apart.",
}
"""Examples on which the best setting is chosen -> the same in words."""

MOST_NAMES = 3
"""Maximum number of methods that a title names."""


class Row(NamedTuple):
    """Accuracies of a setting in percent.

    Attributes:
      name: name of the setting.
      accuracies: (protocol, average) -> accuracy of each seed after the last round on test examples.
      validation: accuracy of each seed by the main protocol on validation examples, mean over clients; empty without
        validation examples.
      curve: rounds of the evaluations, and the accuracies of each seed by the main protocol, means over clients.
      higher_is_better: whether they are accuracies, and not errors of another task.
    """

    name: str
    accuracies: dict[tuple[Protocol, Average], list[float]]
    validation: list[float]
    curve: tuple[list[int], list[list[float | None]]]
    higher_is_better: bool

    def score(self, protocol: Protocol) -> float:
        """Mean over clients and seeds, on validation examples if there are any; of errors minus it, so that the best
        setting has the highest."""
        mean, _ = mean_and_deviation(self.validation or self.accuracies[protocol, "clients"])
        return -math.inf if math.isnan(mean) else mean if self.higher_is_better else -mean


def save(runs: Mapping[str, Sequence[tuple[Cell, Path]]], folder: Path, console: Console) -> None:
    """Print the table of a finished sweep, and save it with its picture: sweep.json, sweep.md, sweep.png, sweep.svg.

    Args:
      runs: setting -> its finished runs, one for each seed, and their folders.
      folder: folder for the files.
      console: console for the table.

    Raises:
      InvalidInput: the folder cannot be written, or a run in it cannot be read.
    """
    cells = next(iter(runs.values()))
    protocol = cells[0][0].request().options.eval_protocol
    configs = [load.read_config(of[0][1]) for of in runs.values()]
    # Finished runs may have a protocol that was not asked for.
    protocols: list[Protocol] = [name for name in PROTOCOLS if name in ALWAYS or name == protocol]
    rows = [_row(name, [path for _, path in of], protocols, protocol) for name, of in runs.items()]
    best = max(rows, key=lambda row: row.score(protocol))
    title = _title(configs, len(cells))
    chosen_on = VALIDATION if best.validation else "test"
    axis, (score, *_) = load.axis(configs[0]).replace("%", "percent"), load.scores(configs[0])
    caption = f"{CAPTION} {CHOSEN_ON[chosen_on]}".format(
        axis=axis[0].upper() + axis[1:], score=score, protocol=protocol
    )
    columns = sorted(best.accuracies, key=lambda column: column[0] != protocol)
    heads = ["setting", *([VALIDATION] if best.validation else [])]
    heads += [name if average == "clients" else f"{name}, pooled" for name, average in columns]
    texts = []
    for row in rows:
        figures = [row.validation] if best.validation else []
        figures += [row.accuracies[column] for column in columns]
        texts.append([f"{row.name} (best)" if row is best else row.name, *map(_figure, figures)])
    console.print(terminal(heads, texts, title=title, caption=caption))
    record = {
        "title": title,
        "dataset": cells[0][0].dataset,
        "data_source": configs[0]["data"]["description"],
        "eval_protocol": protocol,
        "best": best.name,
        "best_chosen_on": chosen_on,
        "settings": [_record(row) for row in rows],
    }
    write_text(folder / f"{NAME}.json", strict_json(record))
    write_text(folder / f"{NAME}.md", f"**{title}**\n\n{markdown(heads, texts)}\n{caption}\n")
    # Imported now: matplotlib takes seconds, and what is saved above does not need it.
    from experiments.show import drawing

    paths = drawing.save(_picture(rows, title, protocol, configs), folder, NAME)
    for path in (folder / f"{NAME}.json", folder / f"{NAME}.md", *paths):
        print_line(console, f"saved {path}")


def _title(configs: Sequence[dict[str, Any]], seeds: int) -> str:
    """Methods, data and seeds."""
    methods = list(dict.fromkeys(label(config["options"]["method"]) for config in configs))
    names = ", ".join(methods) if len(methods) <= MOST_NAMES else f"{len(methods)} methods"
    words = "seed 0" if seeds == 1 else f"seeds 0 to {seeds - 1}"
    return f"{names} on {configs[0]['data']['description']}, {words}"


def _row(name: str, folders: Sequence[Path], protocols: Sequence[Protocol], main: Protocol) -> Row:
    results, accuracies = [load.read_result(folder) for folder in folders], {}
    for where in itertools.product(protocols, AVERAGES):
        accuracies[where] = [_or_nan(result.accuracy(where[0], "last", where[1])) for result in results]
    validated = all(VALIDATION in result.rounds for result in results)
    validation = [_or_nan(result.validation(main)) for result in results] if validated else []
    curve = results[0].rounds["round"], [result.curve(main) for result in results]
    return Row(name, accuracies, validation, curve, load.higher_is_better(results[0].config))


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _figure(values: Sequence[float]) -> str:
    mean, deviation = mean_and_deviation(values)
    if math.isnan(mean):
        return NOTHING
    return f"{mean:.2f}" + ("" if deviation is None else f" ± {deviation:.2f}")


def _record(row: Row) -> dict[str, Any]:
    figures = {
        protocol if average == "clients" else f"{protocol}_pooled": values
        for (protocol, average), values in row.accuracies.items()
    }
    figures |= {VALIDATION: row.validation} if row.validation else {}
    record: dict[str, Any] = {"setting": row.name}
    for name, values in figures.items():
        mean, deviation = mean_and_deviation(values)
        deviation = None if deviation is None else rounded(deviation)
        record[name] = {"mean": rounded(mean), "std": deviation, "per_seed": values}
    return record


def _picture(rows: list[Row], title: str, protocol: Protocol, configs: Sequence[dict[str, Any]]) -> Picture:
    shown = sorted(rows, key=lambda row: -row.score(protocol))[:MOST_LINES]
    chosen = sorted([row for row in rows if row in shown], key=lambda row: row is shown[0])
    # Seeds of one setting are evaluated in the same rounds; settings need not be.
    series = [over_seeds(row.name, *row.curve, is_main=row is shown[0]) for row in chosen]
    caption = f"Values on test examples are means over clients ({protocol}); bands are the range over seeds."
    if len(shown) < len(rows):
        caption += f" The best {len(shown)} of {len(rows)} settings."
    sizes = [
        (f"{config['options']['rounds']} rounds", f"{config['options']['num_clients']} clients") for config in configs
    ]
    common = [words[0] for words in zip(*sizes, strict=True) if len(set(words)) == 1]
    caption += f" {', '.join(common)}." if common else ""
    return Picture(title, caption, [Lines("", ROUND, load.axis(configs[0]), series)], 1)
