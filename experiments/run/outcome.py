"""Messages at the end of a run: its results, or the reason why it diverged."""

from rich.console import Console

from experiments.cli.options import flag
from experiments.cli.own_code import label
from experiments.cli.request import Request
from experiments.folder.run_folder import RunFolder
from experiments.host.console import duration, print_line, print_notice
from experiments.papers import published, settings
from experiments.run.build import Experiment
from experiments.run.history import History
from experiments.show.run_table import results_table
from pfl_jax.engine.checkpoint import Checkpoints
from pfl_jax.errors import Diverged, InvalidInput


class RunDiverged(InvalidInput):
    """A run that ended because clients or the server diverged.

    Args:
      reason: what happened, the likely cause and what can be done.
      kept: end of the message, on what stays of the run.
    """

    def __init__(self, reason: str, kept: str = ""):
        super().__init__(f"{reason}{kept}")
        self.reason = reason


def run_diverged(error: Diverged, request: Request, checkpoints: Checkpoints, folder: RunFolder) -> RunDiverged:
    """Error of a diverged run for the user."""
    saved = checkpoints.rounds()
    kept = f"; the checkpoint of round {saved[-1]} stays in {folder.path}" if saved else ""
    given = {name: value for name, value in request.hyper_parameters.items() if value is not None}
    rates = [f"{flag(name)} {value:g}" for name, value in given.items() if name.endswith("lr")]
    skip = ", or leave such clients out with --on-nan skip-client"
    return RunDiverged(
        f"{label(request.options.method)}: {error}; most likely {' or '.join(rates)} is too large: use a smaller one"
        f"{skip if error.clients and request.options.on_nan == 'stop' else ''}",
        kept,
    )


def print_results(experiment: Experiment, folder: RunFolder, console: Console, history: History) -> None:
    """Print the table of a finished run, and draw its curves if requested."""
    request, options, evaluations = experiment.request, experiment.request.options, history.evaluations
    figure = published.find(request, is_real=experiment.dataset.is_real)
    beside = None if figure is None else f"{figure.accuracy_percent:.2f} ({figure.source})"
    title = f"{label(options.method)} on {experiment.dataset.description}"
    pooled = figure is not None and settings.MEASURES[figure.paper].average == "examples"
    paper_is = "best pooled" if pooled else "last"
    console.print(results_table(evaluations, title, options.eval_protocol, beside, paper_is=paper_is))
    if evaluations[-1].round < options.rounds:
        console.print(f"reached --target-accuracy {options.target_accuracy:g} in round {evaluations[-1].round}")
    if history.diverged:
        print_notice(console, f"clients were left out {history.diverged} times because they had diverged")
    if options.plot:
        # Imported now: matplotlib takes seconds.
        from experiments.show.curves import save_curves

        save_curves(folder.path)
    last = evaluations[-1]
    for budget in experiment.privacy:
        print_line(console, f"spent for every {budget.unit}: {budget.spent(last.round)}")
    print_line(console, f"{last.round} rounds in {duration(last.seconds)}; results in {folder.path}")
