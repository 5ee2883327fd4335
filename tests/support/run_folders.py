"""Run folders written by hand: what a run leaves, without a run."""

import dataclasses
import json

import numpy as np

from experiments.cli.hyper_parameters import documented_info
from experiments.cli.request import parse
from experiments.folder.version import method_version, source_versions
from pfl_jax.methods import METHODS

SMALL = ("--method", "fedpac", "--rounds", "4", "--num-clients", "5", "--train-size", "20", "--test-size", "10")


def write_run(
    path,
    words=SMALL,
    *,
    dataset="digits",
    seed=0,
    rounds=(2, 4),
    finished=True,
    rich=False,
    middle=False,
    description=None,
    is_real=True,
    level=80.0,
):
    """Writes config.json, metrics.jsonl and, of a finished run, summary.json.

    Args:
      path: the run's folder.
      words: its command line, without the seed.
      dataset, seed: of the run.
      rounds: its evaluations.
      finished: whether it has a summary.
      rich: whether lines have all that newer runs log: losses, bytes, pooled accuracies, what the round knew.
      middle: whether the run was evaluated by before_aggregation too.
      description, is_real: what the data was.
      level: accuracy in percent in the first evaluation; each later one is a point better.

    Returns:
      The accuracies [R, N] after aggregation, in percent.
    """
    request = parse(dataset, [*words, "--seed", str(seed)])
    options, rng = request.options, np.random.default_rng(seed)
    clients = options.num_clients
    accuracies = level + np.arange(len(rounds))[:, None] + rng.integers(-8, 9, (len(rounds), clients))
    lines = []
    for number, received in zip(rounds, accuracies, strict=True):
        line = {"round": number}
        scores = {"received": received, "trained": received - 1}
        if middle:
            scores["before_aggregation"] = received - 2
        for protocol, values in scores.items():
            line[protocol] = {
                "mean": values.mean(),
                "std": values.std(),
                "worst_decile": values.min(),
                "clients": clients,
            }
            line[f"{protocol}_per_client"] = values.tolist()
            if rich:
                line[protocol] |= {"jain": 0.987, "loss": 0.432, "macro_f1": 71.5, "auc": 96.25}
                line[protocol]["pooled"] = values.mean() + 0.5
        line |= {"seconds": 10.0 + 2.0 * number, "examples_per_second": 1000.0}
        if rich:
            cohort = rng.permutation(clients).tolist()
            weights = rng.dirichlet(np.ones(clients), clients)
            line |= {"bytes_up": 1_000_000 * number, "bytes_down": 2_000_000 * number, "cohort": cohort}
            line["info"] = {"head_weights": weights.tolist(), "gap": [0.0] * clients}
            line["new_clients"] = {"received": {"mean": 55.5}, "trained": {"mean": 44.5}}
        lines.append(line)
    table = rng.multinomial(20, np.full(10, 0.1), clients)
    config = {
        "dataset": dataset,
        "data": {"description": description or f"{dataset} (files)", "is_real": is_real, "num_classes": 10},
        "options": dataclasses.asdict(options),
        "hyper_parameters": request.hyper_parameters,
        "given": sorted(request.given),
        "train_examples": [20] * clients,
        "class_table": table.tolist() if rich else None,
        "info": documented_info(METHODS[options.method]) if rich else {},
        "chunk": 1,
        "device": "cpu x 2",
        "versions": {"python": "3.11.2", "jax": "0.10.1"} | source_versions(),
        "method_version": method_version(options.method),
    }
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        summary = {"examples_per_second": 1234.0, "wasted_step_share": 0.25}
        (path / "summary.json").write_text(json.dumps(summary))
    return accuracies
