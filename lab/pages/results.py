"""Text of docs/results.md and of README's table."""

import itertools
import math
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pandas as pd

from experiments.commands import comparison
from experiments.commands.paper_table import Entry
from experiments.folder.load import StoredRun
from experiments.folder.stored_runs import Group
from experiments.host.console import duration
from experiments.papers.settings import PAPERS
from experiments.show import tables
from experiments.show.draw import lines, over_runs, rows_of
from experiments.show.pictures import Picture, chart
from experiments.show.tables import NOTHING, number
from experiments.spec.choices import ALWAYS, Protocol
from experiments.spec.option_notes import option_words
from lab import causes, committed
from lab.benchmark.records import stored
from lab.committed import ResultStore
from lab.pages.compared import (
    CIFAR10_SECTIONS,
    CLOSE,
    LAST,
    SECTIONS,
    Compared,
    Found,
    Section,
    apart,
    by_trained,
    compared,
    counts,
    different,
    published_in,
    runs,
)
from lab.pages.parts import FIGURES, Made, filled, mean_text
from lab.queue.field import FIELDS, PROTOCOL, VARIANTS, Comparison, Tuned, left_out, tuned_run
from lab.queue.planned import (
    DATASET,
    FEDAS_BETAS,
    FEDAS_METHODS,
    FEDAS_PARTICIPATIONS,
    READINGS,
    SEEDS,
    cifar10_of_fedas,
    fedas_run,
    reading_run,
)

TEMPLATE = Path(__file__).with_name("results.md.jinja")

METHODS = ("fedpac", "fedavg_ft", "ditto", "fedbabu", "fedrep", "fedper", "local", "fedavg")
"""Methods of the first section that the figure shows."""

LEAST = 70.0
"""Lower end of the axis of accuracies in percent; averaged models are below it for a few rounds."""

MARKS_AT = 1.03
"""Position of the papers' accuracies, in multiples of the last round."""


def made(root: Path) -> Made:
    """The page of a checkout, README's part, and the picture; InvalidInput if a result is damaged."""
    results, readme = root / committed.ROOT.name, root / "README.md"
    library = ResultStore(results)
    found = compared(library, causes.load(DATASET))
    texts = {
        root / "docs/results.md": page(library, found),
        readme: filled(readme, {"results": f"\n{readme_table(library, found)}\n"}),
    }
    fields = [(block, compared_clients(Comparison(block, library))) for block in FIELDS]
    ranks = {root / FIGURES / f"{block}-ranks.svg": comparison.ranks(one) for block, one in fields if one}
    return Made(texts, {root / FIGURES / "results.svg": picture(library)} | ranks)


def page(library: ResultStore, found: Found) -> str:
    """Text of docs/results.md."""
    every, cifar10 = list(library.named.values()), _cifar10(library)
    finished = {section: rows for section, rows in found.items() if all(row.last for row in rows)}
    single = [row for section, rows in found.items() if section not in finished for row in rows if row.last]
    made = [((one.commit or "unknown")[:10], one.config["versions"]["jax"], one.config["device"]) for one in every]
    return tables.page(
        TEMPLATE,
        finished=finished,
        counts=counts(found),
        by_trained=by_trained(list(itertools.chain(*found.values()))),
        readings=[_reading(reading, run) for reading in READINGS if (run := library.find(reading_run(reading).spec))],
        beyond=[sum(one.is_beyond is so for one in itertools.chain(*found.values())) for so in (True, False)],
        close=CLOSE,
        last=LAST,
        rows=lambda there: [_row(one) for one in there],
        single=[[f"{one.entry.row.source}; {one.entry.row.clients} clients", *_row(one)] for one in single],
        cifar10=[[one.entry.row.source, *_row(one)] for one in cifar10],
        cifar10_data=_data(cifar10),
        cifar10_of_fedas=_cifar10_of_fedas(library),
        collaboration=_collaboration(found[SECTIONS[1]]),
        cifar10_collaboration=_collaboration(_of_table(cifar10, 2)),
        replication_on_cifar10=[one for one in cifar10 if one.entry.row.paper == "fedpac_replication"],
        apart=apart,
        measures=lambda there: [_measures(one) for one in there if one.last],
        fedas_methods=[f"`{method}`" for method in FEDAS_METHODS],
        fedas=_fedas(library),
        fields=[_field(Comparison(block, library), library) for block in FIELDS],
        runs=len(every),
        duration=duration(sum(one.seconds for one in every)),
        origins=[[f"`{commit}`", *machine, str(many)] for (commit, *machine), many in sorted(Counter(made).items())],
    )


def readme_table(library: ResultStore, found: Found) -> str:
    """Table of README: all rows of the main table, and what the others come to."""
    heads = ["method", "ours", "paper", "difference", f"cause, beyond {CLOSE:g} point"]
    rows = [
        [f"`{one.entry.row.method}`", *_numbers(one.entry), one.verdict if one.is_close is False else ""]
        for one in found[SECTIONS[0]]
    ]
    every = list(itertools.chain(*found.values()))
    known = [one for one in every if one.is_close is not None]
    of_runs = different(known)
    close = sum(one.is_close is True for one in of_runs)
    seconds = round_seconds()
    return (
        f"On two cores, FedPAC's 200 rounds take {200 * seconds / 60:.0f} minutes "
        f"([{seconds:.2f} s each](docs/performance.md#training)).\n\n"
        f"{tables.markdown(heads, rows, (0, 4))}\n"
        f"{len(known)} of {len(every)} published Fashion-MNIST accuracies have a run. Of these {len(of_runs)} "
        f"different runs, {close} match their published numbers\nwithin {CLOSE:g} point. Supported: a full run without "
        "the cause closes the gap. Plausible: not tested. A dash: no run yet. See\n[all accuracies](docs/results.md).\n"
    ) + _readme_cifar10(_cifar10(library))


def _cifar10(library: ResultStore) -> list[Compared]:
    """Rows of FedPAC's tables and its replication's on CIFAR-10 that have a run; a run of several tables in each."""
    found = compared(library, [], CIFAR10_SECTIONS)
    return [one for rows in found.values() for one in rows if one.last]


def _cifar10_of_fedas(library: ResultStore) -> list[list[str]]:
    """Rows of FedAS's Tables 3 and 4 that have a run, each by the measure of its method."""
    found = []
    for row in cifar10_of_fedas():
        if (run := library.find(row.spec())) is not None:
            one = Entry(row, [run], row.measure)
            words = [f"Table {row.table}", row.setting, f"`{row.method}`", row.procedure, f"`{row.measure.protocol}`"]
            found.append([*words, *_numbers(one)])
    return found


def _data(rows: Sequence[Compared]) -> str:
    """Names of the data of some rows: "cifar10, JPEG copy"."""
    names = dict.fromkeys(one.entry.data for one in rows)
    # Some machines lacked the note beside the laboratory's one copy of these files.
    return "; ".join(name for name in names if not name.endswith("in another order") or len(names) == 1)


def _readme_cifar10(rows: Sequence[Compared]) -> str:
    """Sentence of README on the main table's rows on CIFAR-10; "" without a run."""
    main = _of_table(rows, 1)
    if not main:
        return ""
    found = ", ".join("`{}` {} (paper {}, {})".format(one.entry.row.method, *_numbers(one.entry)) for one in main)
    return f"[On {_data(main)}](docs/results.md#cifar10-jpeg-copy): {found}.\n"


def round_seconds() -> float:
    """Median time of a FedPAC round with both evaluations, in seconds, as docs/performance.md has it."""
    measured = stored(committed.ROOT / "benchmark.jsonl")["training"].rows
    return next(row["s"] for row in measured if row["work"].startswith("FedPAC round") and row["by"] == "pfl_jax")


def _reading(reading: str, run: StoredRun) -> list[str]:
    """Row of another reading of the replication's equations."""
    row, *_ = published_in(Section("fedpac_replication", 1, 20))[::-1]
    received, trained = map(run.accuracy, ALWAYS)
    apart = None if received is None else received - row.accuracy_percent
    return [READINGS[reading], number(received), number(row.accuracy_percent), number(apart, "+.2f"), number(trained)]


def _row(one: Compared) -> list[str]:
    last = NOTHING if one.last is None else " to ".join(map(number, one.last))
    trained = number(one.trained), number(one.trained_difference, "+.2f")
    return [f"`{one.entry.row.method}`", *_numbers(one.entry), last, *trained, _cause(one)]


def _cause(one: Compared) -> str:
    if one.is_close is not False:
        return ""
    parts = []
    if one.fits_trained and not one.was_tested:
        parts.append("plausible: the paper may measure after local training")
    if one.cause is not None:
        verdict = {None: "plausible", True: "supported", False: "refuted"}[one.was_tested]
        parts.append(f"{verdict}: {one.cause.cause}")
        if one.without_cause is not None:
            ours, _, difference = _numbers(one.without_cause)
            run = "not run yet" if one.was_tested is None else f"{ours} ({difference})"
            parts[-1] += f" `{' '.join(option_words(one.cause.options))}`: {run}."
    return "; ".join(parts) or one.verdict


def _collaboration(ablation: Sequence[Compared]) -> tuple[float, float, str] | None:
    """What the combination of heads adds to the alignment alone, in points: ours and the paper's (FedPAC, Table 2), and
    the number of our seeds."""
    by_method = {one.entry.row.method: one.entry for one in ablation}
    both, alone = by_method.get("fedpac"), by_method.get("fedpac -collaboration")
    if both is None or alone is None or both.mean is None or alone.mean is None:
        return None
    seeds = min(len(both.accuracies.known), len(alone.accuracies.known))
    paper = both.row.accuracy_percent - alone.row.accuracy_percent
    return both.mean - alone.mean, paper, "one seed" if seeds == 1 else f"{seeds} seeds"


def _of_table(rows: Sequence[Compared], number: int) -> list[Compared]:
    """Rows of a table of FedPAC."""
    return [one for one in rows if (one.entry.row.paper, one.entry.row.table) == ("fedpac", number)]


def _measures(one: Compared) -> str:
    """Our accuracy minus the paper's by both measures: "`fedpac` -0.66 received, -0.80 trained"."""
    received, trained = (number(value, "+.2f") for value in (one.entry.difference, one.trained_difference))
    return f"`{one.entry.row.method}` {received} received, {trained} trained"


def _numbers(entry: Entry) -> list[str]:
    """Our accuracy, the paper's, and the difference with the interval of ours."""
    return [mean_text(entry.accuracies.known), number(entry.published), entry.difference_text]


def _fedas(library: ResultStore) -> list[list[str]]:
    """Rows of FedAS's settings that have a run of every method: accuracies by its measure, for each protocol."""
    measure, rows = PAPERS["fedas"].measure, []
    for beta, participation in sorted(itertools.product(FEDAS_BETAS, FEDAS_PARTICIPATIONS)):
        found = [library.find(fedas_run(beta, participation, method).spec) for method in FEDAS_METHODS]
        there = [one for one in found if one is not None]
        if len(there) == len(found):
            cells = [[number(one.accuracy(name, measure.score, measure.average)) for name in ALWAYS] for one in there]
            rows.append([f"{beta:g}", f"{participation:g}", *map(" / ".join, cells)])
    return rows


def _field(one: Comparison, library: ResultStore) -> dict[str, object]:
    """Comparison of all methods, for the template."""
    field, options = one.field, tuned_run(one.block, "fedavg", one.field.rates[0]).spec
    words = shlex.join(option_words(field.options | {"rounds": field.rounds}))
    tested = field.tested or options.num_clients * cast(int, options.test_size)
    is_short = field.search_rounds < field.rounds
    # The error is about the same for all methods but the worst.
    best = one.tuned[0].results[0].accuracy(PROTOCOL) if one.tuned and one.tuned[0].results else None
    share = (90.0 if best is None else best) / 100
    rows = [
        [
            f"`{each.method}`",
            each.rate,
            number(each.validation),
            *(_accuracy(each, protocol) for protocol in ALWAYS),
            f"{_sent(each.results[0]) / 1000:,.0f}",
        ]
        for each in one.tuned
        if each.results
    ]
    clients = compared_clients(one)
    return {
        "one": one,
        "clients": None if clients is None else _differences(clients),
        "command": f"python -m experiments.{field.dataset} --method METHOD --lr LR {words} --seed 0",
        "is_short": is_short,
        "variants": {one: shlex.join(option_words(own)) for one, own in VARIANTS.items() if one in field.methods},
        "whole": WHOLE.get(one.block),
        "left_out": left_out(one.block),
        "runs": sum(run.name in library.named for run in one.runs),
        "rows": rows,
        "tested": tested,
        "share": 100 * share,
        "error": 100 * math.sqrt(share * (1 - share) / tested),
    }


WHOLE = {"field-texts": 90_298_464, "field-images": 556_072}
"""Comparison of adapters -> bytes of all parameters of the model beside whose frozen layers they are."""


def compared_clients(one: Comparison) -> comparison.Compared | None:
    """Scores of the clients by PROTOCOL, of methods that have them for all seeds; None for fewer than two."""
    name = f"{PROTOCOL}_per_client"
    runs = {
        each.method: each.results
        for each in one.tuned
        if len(each.results) == len(SEEDS) and all(name in run.lines[-1] for run in each.results)
    }
    if len(runs) < 2:
        return None
    scores = comparison.scores_of(runs, one.field.rounds, PROTOCOL)
    return comparison.Compared(one.field.title, "accuracy in %", True, one.field.rounds, scores)


def _differences(compared: comparison.Compared) -> dict[str, object]:
    """Differences of methods with their intervals, for the template."""
    found = comparison.table(compared)
    notes = found.notes
    if comparison.BASELINE in compared.scores:
        notes = list(dict.fromkeys([*notes, *comparison.table(compared, comparison.BASELINE).notes[1:]]))
    rows = [[f"`{name}`", *cells] for name, *cells in found.rows]
    return {"heads": found.heads, "rows": rows, "notes": notes}


def _sent(one: StoredRun) -> float:
    """Bytes that a client sends in a round, the mean over those of a run."""
    return one.lines[-1]["bytes_up"] / one.round / one.config["options"]["num_clients"]


def _accuracy(one: Tuned, protocol: Protocol) -> str:
    """Accuracy of a method on test examples in percent, over the seeds."""
    return mean_text([value for each in one.results if (value := each.accuracy(protocol)) is not None])


def picture(library: ResultStore) -> Picture:
    """Curves of the methods that have a finished run."""
    by_method = {row.method: row for row in published_in(SECTIONS[0])}
    found = [(row, runs(row, library)) for row in map(by_method.get, METHODS) if row is not None]
    rows = [rows_of(row.method, *Group("", tuple(there)).curve("received")) for row, there in found if there]
    seeds = [len(there) for _, there in found if there] or [0]
    numbers = " to ".join(map(str, dict.fromkeys((min(seeds), max(seeds)))))
    words = f"{numbers} {'seed' if numbers == '1' else 'seeds'}"
    frame: Any = over_runs(pd.concat(rows)) if rows else rows_of("", [], [])
    points = {
        row.method: (MARKS_AT * frame[frame.line == row.method]["round"].max(), row.accuracy_percent)
        for row, there in found
        if there
    }
    # As wide as a page's column, and with letters that are large enough on a telephone.
    caption = f"Fashion-MNIST, 20 clients, {words}; diamonds: FedPAC's Table 1"
    return chart("", caption, lines, frame, main=METHODS[0], points=points, least=LEAST)
