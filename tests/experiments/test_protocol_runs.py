"""The protocol before_aggregation in the folders of runs: written, gone on with, swept; and test examples counted."""

import io
import json

import numpy as np
import pytest
from rich.console import Console
from run_folders import untimed

from experiments.cli.request import parse
from experiments.run import run

pytestmark = pytest.mark.without_f1_auc

SMALL = ["--num-clients", "5", "--train-size", "20", "--test-size", "10", "--epochs", "1", "--no-compilation-cache"]
RUN = ["--method", "fedper", "--rounds", "4", "--eval-every", "2", "--participation", "0.4", *SMALL]
RUN = [*RUN, "--eval-protocol", "before_aggregation"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder, said = tmp_path_factory.mktemp("whole") / "run", io.StringIO()
    run.run(parse("digits", [*RUN, "--out", str(folder)]), Console(file=said, width=200))
    return folder, said.getvalue()


def test_a_run_that_asks_for_it_has_it_everywhere(whole):
    folder, said = whole
    lines, summary = untimed(folder), json.loads((folder / "summary.json").read_text())
    for line in lines:
        members = np.isin(np.arange(5), line["cohort"])
        trained, middle = (np.array(line[f"{name}_per_client"], float) for name in ("trained", "before_aggregation"))
        np.testing.assert_array_equal(middle[members], trained[members])
        assert line["before_aggregation"]["mean"] == pytest.approx(middle.mean(), abs=1e-3)
    assert summary["before_aggregation_accuracy"] == lines[-1]["before_aggregation"]["mean"]
    assert summary["per_client_accuracy"] == lines[-1]["before_aggregation_per_client"]
    means = [line["before_aggregation"]["mean"] for line in lines]
    assert summary["best"]["before_aggregation_accuracy"] == max(means)
    assert summary["best"]["round"] == 2 * (1 + means.index(max(means)))
    assert "round 4/4 · before_aggregation" in said
    assert said.count("before_aggregation  last (4)") == 1
