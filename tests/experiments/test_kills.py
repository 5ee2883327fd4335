"""Killed runs end as the uninterrupted ones; `tests/support/kills.py` kills many more."""

import json
import os

import kills
import moments
import numpy as np

STORED = "checkpoints/0-of-1/3.npz"


def test_what_differs_is_found(tmp_path):
    """The comparison that the figures rest on."""
    for name, loss, second in (("one", 0.5, 1.0), ("same", 0.5, 2.0), ("other", 0.50001, 1.0)):
        (tmp_path / name / "checkpoints/0-of-1").mkdir(parents=True)
        np.savez(tmp_path / name / STORED, **{"state.server": np.ones(3), "further.since": np.array(second)})
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps({"loss": loss, "seconds": second}) + "\n")
    one, same, other = (kills.results(tmp_path / name) for name in ("one", "same", "other"))
    assert one == same
    assert [name for name in one if one[name] != other[name]] == ["metrics.jsonl"]
    np.savez(tmp_path / "same" / STORED, **{"state.server": np.zeros(3)})
    (tmp_path / "same" / ".summary.json.17").write_text("half")
    assert kills.results(tmp_path / "same").keys() - one.keys() == {".summary.json.17"}
    assert kills.results(tmp_path / "same")["checkpoints"] != one["checkpoints"]


def test_a_process_is_killed_at_the_moment_that_was_chosen(tmp_path, monkeypatch):
    killed = []
    monkeypatch.setattr(os, "kill", lambda process, number: killed.append((process, number)))
    path = tmp_path / "summary.json"
    counted = moments.Moments(tmp_path, moments.Kill("half of summary.json is written", 2))
    file = moments.HalfWritten(path.open("w"), moments.what_is(path), counted)
    with file:
        assert file.write("1234") == 4
        assert killed == []
        file.write("56")
        assert killed == [(os.getpid(), 9)]
    assert counted.found == {"half of summary.json is written": 2}
    assert path.read_text() == "123456"
