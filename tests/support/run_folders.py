"""Run folders without a run: what a run leaves, or what its replacement writes with the code of real ones."""

import dataclasses
import json

import numpy as np
from scores import line_of, scores_of

from experiments.cli.command import parse
from experiments.folder.run_folder import CONFIG, METRICS, SUMMARY, ExampleCounts, RunFolder
from experiments.folder.version import method_version, source_versions
from experiments.spec.hyper_parameters import documented_info
from experiments.spec.own_code import method_factory

SMALL = ("--method", "fedpac", "--rounds", "4", "--num-clients", "5", "--train-size", "20", "--test-size", "10")


def log(folder):
    """Evaluations of a run, as its log has them."""
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


def untimed(folder):
    """The same without times."""
    return [{name: value for name, value in line.items() if "second" not in name} for line in log(folder)]


def summary(folder):
    """Summary of a finished run."""
    return json.loads((folder / SUMMARY).read_text())


def _configuration(request, name, source, is_real, **more):
    """What `config.json` has of a run on data of this name."""
    return {
        "dataset": request.dataset,
        "data": {"description": name, "is_real": is_real, "source": source, "num_classes": 10},
        "options": request.options,
        "hyper_parameters": request.hyper_parameters,
        "given": sorted(request.given),
        "versions": source_versions(),
        "method_version": method_version(request.method),
        **({"own_code": request.own_code} if request.own_code else {}),
        **more,
    }


def write_run(
    path,
    words=SMALL,
    *,
    dataset="digits",
    seed=0,
    rounds=(2, 4),
    finished=True,
    middle=False,
    description=None,
    is_real=True,
    level=80.0,
):
    """Writes the folder of a run and returns its accuracies [R, N] after aggregation, in percent.

    All evaluations have the same scores, but the accuracies, of mean `level` at first, are a point better each time.
    `middle`: whether it was evaluated before aggregation too. `description`, `is_real`: what the data was.
    """
    request, rng = parse(dataset, [*words, "--seed", str(seed)]), np.random.default_rng(seed)
    clients, folder = request.num_clients, RunFolder.claim(path, "")
    accuracies = level + np.arange(len(rounds))[:, None] + rng.integers(-8, 9, (len(rounds), clients))
    more = {"train_examples": [20] * clients, "class_table": rng.multinomial(20, np.full(10, 0.1), clients).tolist()}
    more |= {"info": documented_info(method_factory(request.method)), "chunk": 1, "device": "cpu x 2"}
    config = _configuration(request, description or f"{dataset} (files)", "files", is_real, **more)
    folder.write(CONFIG, config | {"versions": {"python": "3.11.2", "jax": "0.10.1"} | source_versions()})
    # The first client has three times as many test examples as the others.
    counts = ExampleCounts(np.where(np.arange(clients), 10, 30), newcomers=np.ones(1))
    newcomers = {name: scores_of(np.full(1, value)) for name, value in (("received", 0.555), ("trained", 0.445))}
    for number, received in zip(rounds, accuracies, strict=True):
        alike = [np.full(clients, value) for value in (0.432, 0.715, 0.9625)]
        scores = [scores_of((received - less) / 100, *alike) for less in (0, 1, 2)]
        order = {"counts": counts, "newcomers": newcomers, "seconds": 10.0 + 2.0 * number, "speed": 1000.0}
        line = line_of(number, *scores[:2], scores[2] if middle else None, **order)
        info = {"head_weights": rng.dirichlet(np.ones(clients), clients).tolist(), "gap": [0.0] * clients}
        folder.log(line | {"cohort": rng.permutation(clients).tolist(), "info": info})
    if finished:
        folder.write(SUMMARY, {"examples_per_second": 1234.0})
    return accuracies


class FakeRuns:
    """Stands in for `run.run`: evaluates with known scores, and trains nothing.

    Half of the clients are better than the mean by 0.05, and have three times as many test examples as the others.

    Attributes:
      accuracies: options -> mean accuracy of each evaluation in [0, 1]; the last one is of the last round.
      validation: the same on validation examples; None without any.
      trained: accuracy after aggregation -> accuracy after training.
      info: number of clients and round -> Info; the cohort has all clients, the last one first.
      is_real: whether the data is the dataset itself.
      note: dataset -> the note on its files.
      stop_at: number of runs after which the next one is interrupted.
      done: requests of the runs.
    """

    def __init__(self):
        self.accuracies, self.validation, self.info = lambda options: [0.6, 0.5], None, lambda clients, number: {}
        self.trained = lambda accuracy: accuracy - 0.1
        self.is_real, self.note, self.stop_at, self.done = True, {}, None, []

    def __call__(self, request, console=None):
        if self.stop_at == len(self.done):
            raise KeyboardInterrupt("interrupted before the first evaluation: nothing is left")
        self.done.append(request)
        out, smaller = request.out, request if self.is_real else request.on_embedded_data()[0]
        options, folder = smaller, RunFolder.claim(out, "")
        name = request.dataset if self.is_real else f"{request.dataset} (embedded digits)"
        source = "files" if self.is_real else "embedded digits"
        own = dataclasses.replace(smaller, given=request.given)
        config = _configuration(own, name, source, self.is_real, train_examples=[50] * options.num_clients)
        config["data"] |= {"note": self.note.get(request.dataset, "")}
        folder.write(CONFIG, config)
        clients = np.arange(options.num_clients)
        means, better = self.accuracies(options), np.where(clients % 2, 0.05, -0.05)
        validation = self.validation(options) if self.validation else [None] * len(means)
        for number, (mean, apart) in enumerate(zip(means, validation, strict=True), start=1):
            last = max(number, options.rounds) if number == len(means) else number
            changes = (lambda value: value, self.trained, lambda value: value - 0.2)
            scores = [
                scores_of(
                    change(mean) + better,
                    validation=None if apart is None else scores_of(np.full(len(clients), change(apart))),
                )
                for change in changes
            ]
            middle = scores[2] if options.eval_protocol == "before_aggregation" else None
            counts, seen = np.where(clients % 2, 30, 10), None if apart is None else np.full(len(clients), 5)
            line = line_of(last, *scores[:2], middle, counts=ExampleCounts(counts, seen))
            info = {name: value.tolist() for name, value in self.info(len(clients), last).items()}
            folder.log(line | {"cohort": clients[::-1].tolist(), "info": info})
        folder.write(SUMMARY, {"seconds": 60.0, "method": options.method})
