"""What a sweep has to show: a table over its settings, for people and programs, and the curves as a picture."""

import statistics
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from experiments.figures.pictures import ACCURACY, ROUND, Lines, Picture, over_seeds
from experiments.results import load
from experiments.results.run_folder import PROTOCOLS, Protocol, rounded, strict_json
from experiments.sweep.__main__ import Order
from pfl_jax.atomic_write import write_whole

NAME = "sweep"
MOST_LINES = 8
"""Settings in the picture, which has as many colours; the best ones, where there are more."""


class Row(NamedTuple):
    """A setting's accuracies in percent, mean over clients, after the last round.

    Attributes:
      name: of the setting.
      accuracies: protocol -> one for each seed.
      curves: protocol -> rounds of the evaluations, and for each seed its accuracies.
    """

    name: str
    accuracies: dict[Protocol, list[float]]
    curves: dict[Protocol, tuple[list[int], list[list[float]]]]

    def mean(self, protocol: Protocol) -> float:
        """Over seeds."""
        return statistics.fmean(self.accuracies[protocol])

    def deviation(self, protocol: Protocol) -> float | None:
        """Standard deviation over seeds; None of one."""
        values = self.accuracies[protocol]
        return statistics.stdev(values) if len(values) > 1 else None


def save(order: Order, console: Console) -> None:
    """Prints the table of a finished sweep, and saves it with its picture: sweep.json, sweep.md, sweep.png, sweep.svg.

    Args:
      order: all runs of which are finished.
      console: for the table.

    Raises:
      InvalidInput: the folder cannot be written, or a run in it cannot be read.
    """
    config = load.read_config(order.runs(order.settings()[0])[0][1])
    protocol: Protocol = config["options"]["eval_protocol"]
    rows = [_row(order, setting) for setting in order.settings()]
    best = max(rows, key=lambda row: row.mean(protocol))
    seeds = "seed 0" if order.seeds == 1 else f"seeds 0 to {order.seeds - 1}"
    title = f"{config['options']['method']} on {config['data']['description']}, {seeds}"
    console.print(_table(rows, best, title, protocol))
    record = {
        "title": title,
        "dataset": order.dataset,
        "data_source": config["data"]["description"],
        "eval_protocol": protocol,
        "best": best.name,
        "settings": [_record(row) for row in rows],
    }
    write_whole(order.out / f"{NAME}.json", strict_json(record))
    write_whole(order.out / f"{NAME}.md", _markdown(rows, best, title, protocol))
    # Imported now: matplotlib takes seconds, and what is saved above does not need it.
    from experiments.figures import drawing

    paths = drawing.save(_picture(rows, title, protocol, config), order.out, NAME)
    for path in (order.out / f"{NAME}.json", order.out / f"{NAME}.md", *paths):
        console.print(f"saved {path}", soft_wrap=True, highlight=False)


def _row(order: Order, setting: tuple[str, ...]) -> Row:
    curves: dict[Protocol, tuple[list[int], list[list[float]]]] = {}
    metrics = [load.read_metrics(folder) for _, folder in order.runs(setting)]
    for protocol in PROTOCOLS:
        curves[protocol] = (
            [line["round"] for line in metrics[0]],
            [[line[protocol]["mean"] for line in run] for run in metrics],
        )
    return Row(order.name(setting), {name: [run[-1] for run in curves[name][1]] for name in PROTOCOLS}, curves)


def _ordered(protocol: Protocol) -> list[Protocol]:
    """The protocol that counts first."""
    return sorted(PROTOCOLS, key=lambda name: name != protocol)


def _figure(row: Row, protocol: Protocol) -> str:
    deviation = row.deviation(protocol)
    return f"{row.mean(protocol):.2f}" + ("" if deviation is None else f" ± {deviation:.2f}")


def _table(rows: list[Row], best: Row, title: str, protocol: Protocol) -> Table:
    table = Table(title=title, caption="accuracy in percent after the last round, mean and deviation over seeds")
    table.add_column("setting")
    for name in _ordered(protocol):
        table.add_column(name, justify="right")
    for row in rows:
        figures = [_figure(row, name) for name in _ordered(protocol)]
        table.add_row(f"{row.name} (best)" if row is best else row.name, *figures, style="bold" if row is best else "")
    return table


def _markdown(rows: list[Row], best: Row, title: str, protocol: Protocol) -> str:
    names = _ordered(protocol)
    lines = [f"**{title}**", "", f"| setting | {' | '.join(names)} |", f"| --- |{' ---: |' * len(names)}"]
    for row in rows:
        figures = " | ".join(_figure(row, name) for name in names)
        lines.append(f"| {row.name}{' (best)' if row is best else ''} | {figures} |")
    return "\n".join([*lines, "", "Accuracy in percent after the last round, mean and deviation over seeds."]) + "\n"


def _record(row: Row) -> dict[str, Any]:
    record: dict[str, Any] = {"setting": row.name}
    for protocol in PROTOCOLS:
        deviation = row.deviation(protocol)
        record[protocol] = {
            "mean": rounded(row.mean(protocol)),
            "std": None if deviation is None else rounded(deviation),
            "per_seed": row.accuracies[protocol],
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
