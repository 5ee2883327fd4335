"""Picture of a figure from its finished runs: title, panels and caption."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from experiments.cli import presets
from experiments.cli.options import PARTITION_OPTIONS, option_words
from experiments.cli.parser import by_option, given
from experiments.figures.figure import Results, Runs
from experiments.papers import settings
from experiments.show.pictures import Panel, Picture

_SAID = {"source", "data_dir", "eval_protocol"}
"""Options of the runs that the caption names elsewhere."""


def compose(results: Sequence[Results]) -> Picture:
    """Picture of a figure.

    Args:
      results: of its runs on each dataset.
    """
    figure = results[0].runs.figure
    data = [one.data for one in results]
    panels: list[Panel] = []
    for one in results:
        for panel in figure.panels(one):
            several = len(results) > 1 and panel.title != one.data
            panels.append(dataclasses.replace(panel, title=f"{panel.title}, {one.data}") if several else panel)
    where = f" on {data[0]}" if len(data) == 1 else ""
    shortened = " (shortened)" if any(_shortening(one.runs) for one in results) else ""
    return Picture(f"{figure.title}: {figure.subject}{where}{shortened}", _caption(results), panels, figure.columns)


def _caption(results: Sequence[Results]) -> str:
    runs, measure, sentences = results[0].runs, results[0].measure, []
    usual, names = settings.MEASURES[runs.figure.paper], runs.figure.measured
    if names:
        paper_is = "" if measure == usual else f"; in the paper {usual.in_words(names)}"
        sentences.append(f"Accuracy in percent {measure.in_words(names)}{paper_is}.")
    sentences += [f"{one.data}: {_setting(one)}." for one in results]
    over = f"Means over seeds 0 to {runs.seeds - 1}; bands are their range."
    sentences.append("Seed 0." if runs.seeds == 1 else over)
    shortening = list(dict.fromkeys(filter(None, (_shortening(one.runs) for one in results))))
    sentences += [f"Not the paper's setting, but {words}." for words in shortening]
    config = results[0].config(results[0].keys[0])
    sentences += [said[config["hyper_parameters"][name]] for name, said in runs.figure.named.items()]
    return " ".join([*sentences, runs.figure.note]).strip()


def _setting(results: Results) -> str:
    """Configuration that all runs on a dataset share."""
    runs = results.runs
    config, varied = results.config(next(iter(runs.variants))), runs.varied
    options: dict[str, Any] = config["options"]
    parts = [f"{options['num_clients']} clients"]
    if "train_size" not in varied:
        sizes = config["train_examples"]
        parts.append(
            f"{min(sizes)} training examples each"
            if min(sizes) == max(sizes)
            else f"{min(sizes)} to {max(sizes)} training examples"
        )
    if "rounds" not in varied:
        parts.append(f"{options['rounds']} rounds")
    if "participation" in runs.values or "participation" not in varied:
        parts.append(f"participation {runs.values.get('participation', options['participation']):g}")
    words = options["partition"]
    for spread in {"s", "beta"} & set(PARTITION_OPTIONS[options["partition"]]) - varied:
        words += f" {spread} = {options[spread]:g}"
    return ", ".join([*parts, words])


def _shortening(runs: Runs) -> str:
    """Options that deviate from the figure's own, as words; "" if none does."""
    figure = runs.figure
    usual = {**presets.values(figure.preset, runs.dataset), **figure.values, "preset": figure.preset}
    # Words count more than values; how often a run is evaluated changes nothing; the data is named elsewhere.
    silent = given(runs.words) | {"eval_every"}
    changed = {name: value for name, value in runs.values.items() if usual.get(name) != value and name not in silent}
    words = [" ".join(part) for part in by_option(runs.words) if not given(part) & (_SAID | figure.named.keys())]
    return " ".join([*option_words(changed), *words])
