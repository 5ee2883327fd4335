"""The end of a run: its summary, the table of its results, or the reason why it ended before."""

import statistics
from typing import Any

import jax
from rich.console import Console

from experiments.folder.best_round import best, phase_summary
from experiments.folder.load import read_config
from experiments.folder.run_folder import ATTACKERS, CONFIG, HONEST, VALIDATION, Line
from experiments.folder.version import note_on_code
from experiments.host.console import duration, print_line, print_notice
from experiments.papers import published
from experiments.papers.settings import Measure
from experiments.run.records import device_name, privacy_record
from experiments.run.rounds import ActiveRun
from experiments.show.tables import results_table
from experiments.spec.choices import FIELD, PROTOCOLS, Average
from experiments.spec.option_notes import flag, label
from experiments.spec.spec import Spec
from pfl_jax.errors import Diverged, InvalidInput

_REPEATED, _COUNTED = (*PROTOCOLS, VALIDATION, HONEST, ATTACKERS, "new_clients"), ("bytes_up", "bytes_down", "diverged")
"""Entries that the summary copies from the evaluation with the results, and from the last evaluation."""


class RunDiverged(InvalidInput):
    """Error of a run that ended because clients or the server diverged; `kept` says which results stay."""

    def __init__(self, reason: str, kept: str = ""):
        super().__init__(f"{reason}{kept}")
        self.reason = reason


def run_diverged(error: Diverged, spec: Spec, kept: str) -> RunDiverged:
    """Error of a diverged run for the user; see `RunDiverged`."""
    given = {name: value for name, value in spec.hyper_parameters.items() if value is not None}
    rates = [f"{flag(name)} {value:g}" for name, value in given.items() if name.endswith("lr")]
    skip = ", or leave such clients out with --on-nan skip-client"
    return RunDiverged(
        f"{label(spec.method)}: {error}; most likely {' or '.join(rates)} is too large: use a smaller one"
        f"{skip if error.clients and spec.on_nan == 'stop' else ''}",
        kept,
    )


def summary(run: ActiveRun) -> dict[str, Any]:
    """Summary of a finished run; shares are in percent, and means over clients unless they are called pooled."""
    experiment, last, final = run.experiment, run.lines[-1], run.final
    spec = experiment.spec
    figure = published.find(spec, is_real=experiment.dataset.is_real)
    primary = experiment.counts.task.primary
    top = {name: best(run.lines, spec.eval_protocol, name, higher_is_better=primary.higher_is_better) for name in FIELD}
    return {
        "dataset": spec.dataset,
        "data_source": experiment.dataset.description,
        "method": label(spec.method),
        "hyper_parameters": spec.hyper_parameters,
        "seed": spec.seed,
        "rounds": spec.rounds,
        "rounds_done": last["round"],
        **({} if spec.patience is None or VALIDATION not in last else {"kept_round": final["round"]}),
        "num_clients": spec.num_clients,
        "eval_protocol": spec.eval_protocol,
        **_means(final, primary.name, "clients"),
        **{name: final[name] for name in _REPEATED if name in final},
        **{name: last[name] for name in _COUNTED if name in last},
        **phase_summary(run.lines, higher_is_better=primary.higher_is_better),
        **({"best_round_chosen_on": VALIDATION} if VALIDATION in last else {}),
        "best": {"round": top["clients"]["round"], **_means(top["clients"], primary.name, "clients")},
        "best_pooled": {"round": top["examples"]["round"], **_means(top["examples"], primary.name, "examples")},
        **privacy_record(experiment, last["round"]),
        **{name: values for name, values in final.items() if name.endswith("_per_client")},
        "paper_accuracy": None if figure is None else figure.accuracy_percent,
        "seconds": last["seconds"],
        "examples_per_second": round(statistics.harmonic_mean(run.steady_speeds), 1),
        "chunk": experiment.settings.chunk,
        "jax_version": jax.__version__,
        "device": device_name(spec),
    }


def write(run: ActiveRun) -> dict[str, Any]:
    """Write the summary of a finished run, and draw its curves if requested; return the written summary."""
    written = run.folder.finish(summary(run))
    if run.experiment.spec.plot:
        # Imported only here: matplotlib takes seconds.
        from experiments.show.curves import save_curves

        save_curves(run.folder.path)
    return written


def _means(line: Line, score: str, average: Average) -> dict[str, float]:
    """Means of a score by protocol: "received_accuracy", ..., and "received_validation_accuracy", ..."""
    found = {}
    for protocol in (name for name in PROTOCOLS if name in line):
        found[f"{protocol}_{score}"] = line[protocol][FIELD[average]]
        if VALIDATION in line:
            found[f"{protocol}_{VALIDATION}_{score}"] = line[VALIDATION][protocol][FIELD[average]]
    return found


def print_results(run: ActiveRun, console: Console) -> None:
    """Print the table of a finished run."""
    experiment, last = run.experiment, run.lines[-1]
    spec, task = experiment.spec, experiment.counts.task
    figure = published.find(spec, is_real=experiment.dataset.is_real)
    beside = None if figure is None else f"{figure.accuracy_percent:.2f} ({figure.source})"
    title = f"{label(spec.method)} on {experiment.dataset.description}"
    measure = Measure("received", "last", "clients") if figure is None else figure.measure
    how: Any = {"paper_is": "best pooled" if measure.average == "examples" else "last", "paper_by": measure.protocol}
    if beside is not None and measure.protocol not in last:
        print_notice(console, f"Note: the paper's accuracy, {beside}, is by --eval-protocol {measure.protocol}.")
        beside = None
    console.print(results_table(run.lines, task, title, spec.eval_protocol, beside, **how))
    if run.has_reached_target():
        console.print(f"reached --target-accuracy {spec.target_accuracy:g} in round {last['round']}")
    if spec.patience is not None and VALIDATION in last:
        stopped = f"stopped after round {last['round']} of {spec.rounds}: " if last["round"] < spec.rounds else ""
        console.print(f"{stopped}kept round {run.final['round']}, the best on validation examples (--patience)")
    if note := note_on_code(read_config(run.folder.path)):
        print_notice(console, f"Note: {note} in {run.folder.path / CONFIG}.")
    if run.counts.diverged:
        print_notice(console, f"clients were left out {run.counts.diverged} times because they had diverged")
    for budget in experiment.privacy:
        print_line(console, f"spent for every {budget.unit}: {budget.spent(last['round'])}")
    print_line(console, f"{last['round']} rounds in {duration(last['seconds'])}; results in {run.folder.path}")
