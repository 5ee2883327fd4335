"""Two and four processes over loopback make the run that one makes; what cannot be is one line."""

import os
import re
import signal
import socket
import time
from typing import NamedTuple

import jax
import numpy as np
import pytest
from run_folders import log
from test_command_line import process

from experiments.cli.command import parse
from experiments.folder.run_folder import METRICS
from experiments.host import distributed
from experiments.host.distributed import LOST
from experiments.host.jax_config import devices
from pfl_jax import InvalidInput
from pfl_jax.engine.checkpoint import FOLDER, Checkpoints

RUN = ["--method", "fedper", "--rounds", "15", "--num-clients", "5", "--train-size", "20", "--test-size", "10"]
RUN = [*RUN, "--participation", "0.6", "--epochs", "1", "--eval-every", "1"]


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def start(*words, cwd, different=(), number=2):
    """Processes of one run; all but the first have some words more."""
    told = ["--distributed", "--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", str(number)]
    return [
        process("experiments.digits", *words, *(different if index else ()), *told, "--process-id", str(index), cwd=cwd)
        for index in range(number)
    ]


def finish(children):
    told = [child.communicate(timeout=500) for child in children]
    return [child.returncode for child in children], [out for out, _ in told], [err for _, err in told]


def wait(until, children):
    """Until something is true, as long as all children live."""
    deadline = time.monotonic() + 400
    while not until():
        assert time.monotonic() < deadline
        assert all(child.poll() is None for child in children), finish(children)
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["device", "host"])
def test_two_processes_are_one_run_stop_together_and_go_on(tmp_path, place):
    words = [*RUN, "--state-on", place]
    children = start(*words, "--out", "two", "--devices", "4", cwd=tmp_path)
    try:
        wait(lambda: (tmp_path / "two" / METRICS).exists() and len(log(tmp_path / "two")) >= 2, children)
    except AssertionError:
        for child in children:
            child.kill()
        raise
    # To the one that does not report: all stop after the same round.
    children[1].send_signal(signal.SIGTERM)
    codes, outs, errors = finish(children)
    assert codes == [130, 130], errors
    (done,) = Checkpoints(tmp_path / "two" / FOLDER).rounds()
    assert f"goes on after round {done}" in errors[0]
    assert errors[0].count("\n") == 1
    assert (outs[1], errors[1]) == ("", "")
    assert len(log(tmp_path / "two")) == done < 15

    codes, outs, errors = finish(start("--resume", "two", "--devices", "2", cwd=tmp_path))
    assert codes == [0, 0], errors
    assert f"continuing two after round {done}" in outs[0]
    assert "in 2 processes" in outs[0]
    assert (outs[1], errors) == ("", ["", ""])

    child = process("experiments.digits", *words, "--devices", "1", "--out", "one", cwd=tmp_path)
    assert finish([child])[0] == [0]
    assert_same(log(tmp_path / "two"), log(tmp_path / "one"))


def assert_same(some, others):
    for two, one in zip(some, others, strict=True):
        for name in ("received_per_client", "trained_per_client"):
            # One test example of ten is ten points: rounding may turn one now and then.
            got, want = (np.array(line[name], float) for line in (two, one))
            np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
            assert np.nanmax(np.abs(got - want)) <= 10.01
            assert abs(np.nanmean(got) - np.nanmean(want)) <= 4.01


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "number"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_a_killed_process_ends_the_other_and_the_run_goes_on(tmp_path, victim, number):
    words = [*RUN, "--rounds", "300", "--state-on", "host", "--checkpoint-every", "1", "--out", "two"]
    children = start(*words, "--devices", "2", cwd=tmp_path)
    wait(lambda: (tmp_path / "two" / METRICS).exists() and len(log(tmp_path / "two")) >= 3, children)
    os.kill(children[victim].pid, number)
    began = time.monotonic()
    _, err = children[1 - victim].communicate(timeout=60)
    assert time.monotonic() - began < 60
    if number == signal.SIGSTOP:
        os.kill(children[victim].pid, signal.SIGKILL)
    children[victim].communicate(timeout=60)
    if children[1 - victim].returncode == 2:
        assert re.fullmatch(rf"error: {LOST}(; --resume two goes on after .*)?\n", err), err
    else:
        # JAX's runtime was first.
        assert children[1 - victim].returncode == -signal.SIGABRT
    done = len(log(tmp_path / "two"))
    child = process("experiments.digits", "--resume", "two", cwd=tmp_path)
    wait(lambda: len(log(tmp_path / "two")) > done + 1, [child])
    child.send_signal(signal.SIGTERM)
    assert finish([child])[0] == [130]


def test_a_lost_process_is_told_from_other_errors():
    assert distributed.is_peer_lost(
        RuntimeError("INTERNAL: Gloo all-reduce failed: Connection closed by peer [127.0.0.1]")
    )
    assert not distributed.is_peer_lost(RuntimeError("RESOURCE_EXHAUSTED: Out of memory"))
    assert not distributed.is_peer_lost(InvalidInput("the folder barrier-study is not empty"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "different", "message"),
    [
        (RUN, ["--lr", "0.2"], "the processes' command lines differ: --lr is 0.05 in process 0 and 0.2 in process 1"),
        ([*RUN, "--num-clients", "1"], [], "2 processes cannot share 1 clients: start at most 1"),
        (RUN, ["--data-dir", "nowhere", "--source", "files"], "command lines differ"),
        ([*RUN, "--out", "taken"], [], "the folder taken is not empty"),
    ],
)
def test_what_cannot_be_is_one_line_of_the_first_process(tmp_path, words, different, message):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("")
    codes, outs, errors = finish(start(*words, cwd=tmp_path, different=different))
    assert codes == [2, 2]
    assert message in errors[0]
    assert errors[0].count("\n") == 1
    assert (outs[1], errors[1]) == ("", "")


@pytest.mark.parametrize(
    ("words", "there", "want"),
    [
        ([], (4, 2), [0, 1, 4, 5]),
        ([], (8, 8), [0, 1, 8, 9]),
        (["--devices", "2"], (4, 2), [0, 4]),
        (["--devices", "3"], (4, 2), "cannot be shared equally by 2 processes"),
        (["--devices", "6"], (4, 2), "is more than 2 processes have, 2 each"),
        (["--devices", "8"], (8, 8), "is more than the 5 clients"),
        (["--num-clients", "1"], (4, 2), "2 processes cannot share 1 clients"),
    ],
)
def test_all_processes_give_equally_many_devices(words, there, want, monkeypatch):
    class Device(NamedTuple):
        id: int
        process_index: int

    every = [Device(number, int(number >= there[0])) for number in range(sum(there))]
    monkeypatch.setattr(jax, "devices", lambda: every)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    options = parse("digits", ["--num-clients", "5", "--distributed", *words])
    if isinstance(want, str):
        with pytest.raises(InvalidInput, match=want):
            devices(options)
    else:
        assert [one.id for one in devices(options)] == want


def test_without_a_cluster_the_line_says_what_to_give(monkeypatch):
    for name in ("SLURM_JOB_ID", "OMPI_MCA_orte_hnp_uri", "JAX_COORDINATOR_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    # This process has its devices already, which the runtime would find first.
    monkeypatch.setattr(jax._src.xla_bridge, "backends_are_initialized", lambda: False)
    with pytest.raises(InvalidInput, match="--distributed found no cluster") as error:
        distributed._start(parse("digits", ["--distributed"]))
    assert "\n" not in str(error.value)
