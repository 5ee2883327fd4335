"""Tables of the benchmark."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

GIGA = 1e9
MIB = 2**20


def _table(title: str, columns: Iterable[str], rows: Iterable[Iterable[Any]], caption: str = "") -> Table:
    table = Table(title=title, caption=caption or None, title_justify="left", caption_justify="left")
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place == 0 else "right")
    for row in rows:
        table.add_row(*map(str, row))
    return table


def show(console: Console, results: dict[str, Any]) -> None:
    """Print all measured sections.

    Args:
      console: where to.
      results: as the JSON file has them.
    """
    tables = {
        "training": _comparisons,
        "methods": _methods,
        "variants": _variants,
        "optimizations": _optimizations,
        "chunks": _chunks,
        "waste": _waste,
        "growth": _growth,
        "memory_growth": _memory_growth,
        "many_clients": _many_clients,
        "sweep": _sweep,
        "overhead": _overhead,
    }
    for name, build in tables.items():
        if name in results:
            console.print(build(results))


def _comparisons(results: dict[str, Any]) -> Table:
    rows = []
    for name, what in (("training", "local training, E = 1"), ("round", "FedPAC round")):
        record = results[name]
        for side in ("jax", "torch"):
            if f"{side}_seconds" not in record:
                continue
            rate = record.get(f"{side}_examples_per_second")
            share = record.get(f"{side}_fraction_of_peak")
            rows.append(
                (
                    what,
                    "pfl_jax" if side == "jax" else "PyTorch",
                    f"{record[f'{side}_seconds']:.2f}",
                    "" if rate is None else f"{rate:,.0f}",
                    "" if share is None else f"{share:.1%}",
                    f"{record['ratio']:.2f}" if side == "jax" and "ratio" in record else "",
                )
            )
    record, peak = results["round"], results["peak"]["peak"] / GIGA
    caption = (
        f"{record['clients']} clients of {record['examples']} examples; the round has E = {record['epochs']} and both "
        f"evaluations; medians of interleaved repetitions; float32 matrix-product peak {peak:.0f} GFLOP/s"
    )
    columns = ("work", "by", "seconds", "examples/s", "of peak", "speed-up")
    return _table("Beside plain PyTorch", columns, rows, caption)


def _methods(results: dict[str, Any]) -> Table:
    rows = [
        (
            row["method"],
            row["clients"],
            row["cohort"],
            row["chunk"] or "all",
            row["epochs"],
            f"{row['round_seconds']:.2f}",
            "" if row["evaluation_seconds"] is None else f"{row['evaluation_seconds']:.2f}",
            f"{row['examples_per_second']:,.0f}",
            f"{row['fraction_of_peak']:.1%}",
        )
        for row in results["methods"]
    ]
    columns = ("method", "clients", "cohort", "chunk", "E", "s/round", "s/eval", "examples/s", "of peak")
    return _table(
        "Rounds", columns, rows, "examples/s: training examples visited in local epochs; of peak: of these alone"
    )


def _variants(results: dict[str, Any]) -> Table:
    rows = [
        (row["form"], row["chunk"], row["devices"], row["precision"], f"{row['examples_per_second']:,.0f}")
        for row in results["variants"]
    ]
    caption = f"{results['variants'][0]['clients']} clients, local training"
    return _table(
        "Convolutions, chunks and devices", ("form", "chunk", "devices", "precision", "examples/s"), rows, caption
    )


def _optimizations(results: dict[str, Any]) -> Table:
    rows = [
        (
            row["name"],
            row["before"],
            row["after"],
            f"{row['before_seconds'] * 1e3:.1f}",
            f"{row['after_seconds'] * 1e3:.1f}",
            f"{row['ratio']:.2f}",
        )
        for row in results["optimizations"]
    ]
    caption = "one client, one device; medians of interleaved repetitions"
    return _table("Optimisations", ("what", "before", "after", "ms before", "after", "ratio"), rows, caption)


def _chunks(results: dict[str, Any]) -> Table:
    records = results["chunks"]
    columns = ("model", "pictures like", *(f"chunk {chunk}" for chunk in records[0]["examples_per_second"]))
    rows = [
        (row["model"], row["dataset"], *(f"{rate:,.0f}" for rate in row["examples_per_second"].values()))
        for row in records
    ]
    caption = f"examples/s of local training, {records[0]['clients']} clients, {results['machine']['devices']}"
    return _table("Clients under one vmap on a device", columns, rows, caption)


def _waste(results: dict[str, Any]) -> Table:
    records = results["waste"]
    rows = [
        (
            row["clients"],
            f"{row['smallest']}-{row['largest']}",
            *(f"{share:.1%}" for share in row["by_chunk"].values()),
            f"{row['auto']['cpu']} / {row['auto']['gpu']}",
        )
        for row in records
    ]
    columns = ("clients", "examples", *records[0]["by_chunk"], "auto: CPU / 1 GPU")
    return _table(f"Wasted gradient steps by chunk, Dirichlet 0.1, {records[0]['devices']} devices", columns, rows)


def _growth(results: dict[str, Any]) -> Table:
    record = results["growth"]
    rows = [
        (
            row["clients"],
            row["cohort"],
            f"{row['round_seconds']:.2f}",
            f"{row['alone_seconds']:.2f}",
            f"{row['round_seconds'] / row['alone_seconds']:.2f}",
            f"{row['evaluation_seconds']:.2f}",
            f"{row['peak_bytes'] / MIB:,.0f}",
        )
        for row in record["rows"]
    ]
    columns = ("clients", "cohort", "s/round", "trained alone", "ratio", "s/eval", "peak MiB")
    caption = (
        f"{record['examples']} examples each; a round takes {record['seconds_per_client'] * 1e3:.1f} ms for each "
        f"client of the cohort and {record['seconds_at_no_client'] * 1e3:.1f} ms once, to within "
        f"{record['largest_deviation']:.0%}"
    )
    return _table("FedPAC from few to many clients", columns, rows, caption)


def _memory_growth(results: dict[str, Any]) -> Table:
    early, last = results["memory_growth"]["rounds"]
    rows = []
    if None not in results["memory_growth"]["resident_bytes"]:
        first, then = (held / MIB for held in results["memory_growth"]["resident_bytes"])
        rows.append((f"memory after round {early} and {last}", f"{first:,.1f} MiB, {then:,.1f} MiB"))
    for number, start in enumerate(results["second_start"], start=1):
        rows.append(
            (
                f"programs compiled in start {number}",
                f"{start['compiled']} of {start['programs']}, {start['seconds']:.1f} s",
            )
        )
    return _table("Many rounds, second start", ("what", "measured"), rows)


def _many_clients(results: dict[str, Any]) -> Table:
    records = results["many_clients"]
    rows = [
        (
            row["method"],
            f"{row['round_seconds']:.2f}",
            f"{row['evaluation_seconds']:.0f}",
            f"{row['state_bytes'] / MIB:,.0f}",
            f"{row['peak_bytes'] / MIB:,.0f}",
            f"{row['trained_first']:.1f}, {row['trained_last']:.1f}",
            f"{row['received']:.1f}",
        )
        for row in records
    ]
    clients, cohort, rounds = (records[0][name] for name in ("clients", "cohort", "rounds"))
    return _table(
        f"{clients:,} clients, {cohort} in a round, states on the host",
        ("method", "s/round", "s/eval", "states MiB", "peak MiB", "trained %", "received %"),
        rows,
        f"trained: cohorts of the first three and of the last three of {rounds} rounds; received: everyone at the end",
    )


def _sweep(results: dict[str, Any]) -> Table:
    record = results["sweep"]
    rows = [
        (what, f"{record[name]['seconds']:.1f}", f"{record[name]['round_seconds']:.1f}")
        for name, what in (("alone", "one after another"), ("together", "as a sweep"))
    ]
    rows.append(("ratio", f"{record['ratio']:.2f}", f"{record['round_ratio']:.2f}"))
    return _table(
        f"{record['together']['runs']} runs of FedPAC", ("runs", "s, compilation included", "s, after round 1"), rows
    )


def _overhead(results: dict[str, Any]) -> Table:
    record = results["overhead"]
    rows = [
        ("round and both evaluations, accuracies alone", f"{record['round_seconds']:.2f}", ""),
        ("loss, macro-F1 and AUC in addition", "", f"{record['scores_share']:.1%}"),
        ("a line of the log", f"{record['line_seconds']:.3f}", f"{record['line_share']:.1%}"),
        ("a checkpoint", f"{record['checkpoint_seconds']:.3f}", f"{record['checkpoint_share']:.1%}"),
    ]
    title = f"Overhead of a run beside its rounds, FedPAC, {record['clients']} clients"
    return _table(title, ("what", "s", "of the round"), rows)
