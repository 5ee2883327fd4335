"""Results of a sweep: a table over its settings, for people and programs, and the curves as a picture."""

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from experiments.config.measures import ALWAYS, AVERAGES, PROTOCOLS, Average, Protocol
from experiments.plots.pictures import ACCURACY, ROUND, Lines, Picture, over_seeds
from experiments.results import load
from experiments.results.run_folder import rounded, strict_json
from experiments.sweep.plan import SweepRequest
from pfl_jax.atomic_write import write_whole

NAME = "sweep"
CAPTION = (
    "Accuracy in percent after the last round, means over clients (pooled: over all their test examples); mean and "
    "deviation over seeds"
)
MOST_LINES = 8
"""Settings in the picture, which has as many colours; the best ones, where there are more."""


class Row(NamedTuple):
    """Accuracies of a setting in percent.

    Attributes:
      name: of the setting.
      accuracies: protocol, average -> one for each seed, after the last round.
      curves: protocol -> rounds of the evaluations, and for each seed its accuracies, means over clients.
    """

    name: str
    accuracies: dict[tuple[Protocol, Average], list[float]]
    curves: dict[Protocol, tuple[list[int], list[list[float]]]]

    def mean(self, protocol: Protocol, average: Average = "clients") -> float:
        """Mean over seeds."""
        return statistics.fmean(self.accuracies[protocol, average])

    def deviation(self, protocol: Protocol, average: Average = "clients") -> float | None:
        """Standard deviation over seeds; None for one seed."""
        values = self.accuracies[protocol, average]
        return statistics.stdev(values) if len(values) > 1 else None


def save(request: SweepRequest, console: Console) -> None:
    """Print the table of a finished sweep, and save it with its picture: sweep.json, sweep.md, sweep.png, sweep.svg.

    Args:
      request: all runs of which are finished.
      console: for the table.

    Raises:
      InvalidInput: the folder cannot be written, or a run in it cannot be read.
    """
    config = load.read_config(request.runs(request.settings()[0])[0][1])
    protocol = request.runs(request.settings()[0])[0][0].request().options.eval_protocol
    # Finished runs may have one that was not asked for.
    protocols: list[Protocol] = [name for name in PROTOCOLS if name in ALWAYS or name == protocol]
    rows = [_row(request, setting, protocols) for setting in request.settings()]
    best = max(rows, key=lambda row: row.mean(protocol))
    seeds = "seed 0" if request.seeds == 1 else f"seeds 0 to {request.seeds - 1}"
    title = f"{config['options']['method']} on {config['data']['description']}, {seeds}"
    console.print(_table(rows, best, title, protocol))
    record = {
        "title": title,
        "dataset": request.dataset,
        "data_source": config["data"]["description"],
        "eval_protocol": protocol,
        "best": best.name,
        "settings": [_record(row) for row in rows],
    }
    write_whole(request.out / f"{NAME}.json", strict_json(record))
    write_whole(request.out / f"{NAME}.md", _markdown(rows, best, title, protocol))
    # Imported now: matplotlib takes seconds, and what is saved above does not need it.
    from experiments.plots import drawing

    paths = drawing.save(_picture(rows, title, protocol, config), request.out, NAME)
    for path in (request.out / f"{NAME}.json", request.out / f"{NAME}.md", *paths):
        console.print(f"saved {path}", soft_wrap=True, highlight=False)


def _row(request: SweepRequest, setting: tuple[str, ...], protocols: Sequence[Protocol]) -> Row:
    folders = [folder for _, folder in request.runs(setting)]
    metrics = [load.read_metrics(folder) for folder in folders]
    rounds = [line["round"] for line in metrics[0]]
    curves: dict[Protocol, tuple[list[int], list[list[float]]]] = {}
    accuracies: dict[tuple[Protocol, Average], list[float]] = {}
    for name in protocols:
        curves[name] = (rounds, [[line[name]["mean"] for line in run] for run in metrics])
        for average in AVERAGES:
            found = [load.accuracy(folder, name, "last", average) for folder in folders]
            accuracies[name, average] = [math.nan if value is None else value for value in found]
    return Row(request.name(setting), accuracies, curves)


def _columns(rows: list[Row], protocol: Protocol) -> dict[str, tuple[Protocol, Average]]:
    """Headings with the values below them, the main protocol first."""
    columns = sorted(rows[0].accuracies, key=lambda column: column[0] != protocol)
    return {name if average == "clients" else f"{name}, pooled": (name, average) for name, average in columns}


def _figure(row: Row, column: tuple[Protocol, Average]) -> str:
    deviation = row.deviation(*column)
    return f"{row.mean(*column):.2f}" + ("" if deviation is None else f" ± {deviation:.2f}")


def _table(rows: list[Row], best: Row, title: str, protocol: Protocol) -> Table:
    table = Table(title=title, caption=f"{CAPTION[0].lower()}{CAPTION[1:]}")
    table.add_column("setting")
    columns = _columns(rows, protocol)
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows:
        figures = [_figure(row, column) for column in columns.values()]
        table.add_row(f"{row.name} (best)" if row is best else row.name, *figures, style="bold" if row is best else "")
    return table


def _markdown(rows: list[Row], best: Row, title: str, protocol: Protocol) -> str:
    columns = _columns(rows, protocol)
    lines = [f"**{title}**", "", f"| setting | {' | '.join(columns)} |", f"| --- |{' ---: |' * len(columns)}"]
    for row in rows:
        figures = " | ".join(_figure(row, column) for column in columns.values())
        lines.append(f"| {row.name}{' (best)' if row is best else ''} | {figures} |")
    return "\n".join([*lines, "", f"{CAPTION}."]) + "\n"


def _record(row: Row) -> dict[str, Any]:
    record: dict[str, Any] = {"setting": row.name}
    for (protocol, average), values in row.accuracies.items():
        deviation = row.deviation(protocol, average)
        record[protocol if average == "clients" else f"{protocol}_pooled"] = {
            "mean": rounded(row.mean(protocol, average)),
            "std": None if deviation is None else rounded(deviation),
            "per_seed": values,
        }
    return record


def _picture(rows: list[Row], title: str, protocol: Protocol, config: dict[str, Any]) -> Picture:
    shown = sorted(rows, key=lambda row: -row.mean(protocol))[:MOST_LINES]
    chosen = [row for row in rows if row in shown]
    # Seeds of one setting are evaluated in the same rounds; settings need not be.
    series = [
        over_seeds(row.name, *row.curves[protocol], is_main=row is shown[0])
        for row in sorted(chosen, key=lambda row: row is shown[0])
    ]
    caption = f"Accuracies are means over clients ({protocol}); bands are the range over seeds."
    if len(shown) < len(rows):
        caption += f" The best {len(shown)} of {len(rows)} settings."
    caption += f" {config['options']['rounds']} rounds, {config['options']['num_clients']} clients."
    return Picture(title, caption, [Lines("", ROUND, ACCURACY, series)], 1)
