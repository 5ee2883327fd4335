"""Runs with differential privacy: their budget in every output, and the page of the measured ones."""

import json

import pytest
from rich.console import Console

from experiments.cli.request import parse
from experiments.lab.queue.planned import PRIVACY_NOISE, SHORT_METHODS, short_run
from experiments.run import run
from pfl_jax.methods import METHODS
from pfl_jax.methods.factories import on_linear_model
from pfl_jax.privacy import gaussian_epsilon, gaussian_noise

pytest.importorskip("dp_accounting")

WORDS = "--method fedper --rounds 3 --eval-every 2 --num-clients 4 --train-size 20 --test-size 10"
PRIVATE = "--epochs 2 --dp-clip 1 --dp-noise 2 --dp-delta 0.01 --client-clip 1 --client-noise 3 --no-compilation-cache"


@pytest.mark.without_f1_auc
@pytest.mark.slow
def test_every_output_of_a_run_has_its_budget(tmp_path, capsys):
    request = parse("digits", [*f"{WORDS} {PRIVATE}".split(), "--out", str(tmp_path / "run")])
    run.run(request, Console(width=1000))
    config, summary = (json.loads((tmp_path / "run" / name).read_text()) for name in ("config.json", "summary.json"))
    assert config["privacy"] == summary["privacy"]
    example, client = summary["privacy"]
    assert (example["unit"], example["clip"], example["noise"], example["delta"]) == ("example", 1.0, 2.0, 0.01)
    assert (client["unit"], client["clip"], client["noise"]) == ("client", 1.0, 3.0)
    assert example["uncovered"] == ["number of examples: weight of the client in the mean"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]

    def spent(rounds):
        # All take part: a round of two epochs uses an example twice, and a client once.
        return pytest.approx(
            {"example": gaussian_epsilon(2.0, 2 * rounds, 0.01), "client": gaussian_epsilon(3.0, rounds, 0.01)},
            rel=1e-5,
        )

    assert [line["round"] for line in lines] == [2, 3]
    assert [line["epsilon"] for line in lines] == [spent(2), spent(3)]
    assert {one["unit"]: one["epsilon"] for one in summary["privacy"]} == spent(3)
    printed = capsys.readouterr().out
    assert f"differential privacy of every example: epsilon {example['epsilon']:.4g} at delta 0.01" in printed
    assert "not covered: number of examples" in printed
    assert f"spent for every client: epsilon {client['epsilon']:.4g}" in printed


def test_noise_of_the_queue_is_that_of_its_epsilons():
    for epsilon in PRIVACY_NOISE:
        for method in SHORT_METHODS:
            request = short_run("privacy", method, f"epsilon={epsilon}").cell.request()
            uses = 30 * on_linear_model(METHODS[method], request.hyper_parameters).privacy.passes
            exact = gaussian_noise(epsilon, uses, 0.1 / (20 * 600))
            assert exact <= request.options.dp_noise <= exact + 0.01
            assert (request.options.dp_clip, request.options.dp_delta) == (1.0, None)
