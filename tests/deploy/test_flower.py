"""Apps of Flower: their messages in this process, and the commands of docs/deploy.md with processes of their own.

Both need flwr, which the other tests do without.
"""

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import pfl_jax
from pfl_jax.data.federated import client_data
from pfl_jax.deploy import Deployment
from pfl_jax.deploy.flower import client_app, server_app
from pfl_jax.engine.communication import Traffic, traffic
from pfl_jax.errors import InvalidInput
from pfl_jax.methods import METHODS
from pfl_jax.testing.problems import tiny_federation, tiny_model

ROOT = Path(__file__).parents[2]
FEDERATION = tiny_federation()
METHOD = METHODS["fedper"](tiny_model(), pfl_jax.LocalTraining(lr=0.1, batch_size=4))
SETTINGS = pfl_jax.Settings(rounds=3, chunk=1)
KEY = jax.random.key(5)


def deploy(config):
    return Deployment(METHOD, SETTINGS, KEY, FEDERATION.num_clients, client_data(FEDERATION, 0, "train"))


def load(config, client):
    return client_data(FEDERATION, client, "train"), client_data(FEDERATION, client, "test")


class Grid:
    """The part of Flower's grid that the server uses, with the client apps in this process.

    nodes: node -> its configuration. dead: nodes that answer with an error.
    """

    def __init__(self, folder):
        self.app = client_app(deploy, load)
        self.nodes = {10 + i: {"partition-id": i, "state-folder": str(folder / str(i))} for i in range(4)}
        self.dead = set()

    def get_node_ids(self):
        return [*self.nodes]

    def send_and_receive(self, messages, timeout):
        from flwr.app import Context, Error, Message, RecordDict

        for message in messages:
            node = message.metadata.dst_node_id
            assert message.metadata.ttl == timeout == 5
            if node in self.dead:
                yield Message(Error(code=0, reason="it is dead"), reply_to=message)
            else:
                yield self.app(message, Context(7, node, self.nodes[node], RecordDict(), {}))


@pytest.fixture
def flower(monkeypatch):
    """Flower, in whose processes messages have a sender."""
    pytest.importorskip("flwr")
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def test_without_flower_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr", None)
    with pytest.raises(InvalidInput, match=r"pip install 'pfl_jax\[flower\]'"):
        client_app(deploy, load)
    with pytest.raises(InvalidInput, match="Flower is missing"):
        server_app(deploy, print)


@pytest.mark.usefixtures("flower")
def test_apps_in_this_process_equal_the_simulation(tmp_path):
    """A client whose node died after the first round is absent, and back with its state as another node."""
    grid, results = Grid(tmp_path), []

    def report(config, result):
        results.append(result)
        if result.round == 1:
            grid.dead = {11}
        if result.round == 2:
            grid.nodes[25] = grid.nodes.pop(11)

    server_app(deploy, report)(grid, SimpleNamespace(run_config={"timeout": 5}))
    want = list(pfl_jax.run(METHOD, FEDERATION, SETTINGS, KEY))
    np.testing.assert_allclose(results[0].received["loss"], want[0].received["loss"], rtol=1e-5)
    assert [one.arrived.tolist() for one in results] == [[True] * 4, [True, False, True, True], [True] * 4]
    assert np.isnan(results[1].received["loss"]).tolist() == [False, True, False, False]
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.npz")) == [
        f"{client}/7-{client}.npz" for client in range(4)
    ]
    # Two arrays down; up the number of examples and the weight of the mean too. Of each NumPy's header.
    counted = traffic(METHOD, FEDERATION)
    assert results[0].traffic == Traffic(up=4 * (counted.up + 8 + 4 * 128), down=4 * (counted.down + 2 * 128))


@pytest.mark.usefixtures("flower")
def test_a_node_without_its_configuration_is_told(tmp_path):
    grid = Grid(tmp_path)
    grid.nodes[10] = {"partition-id": 0}
    with pytest.raises(InvalidInput, match="--node-config"):
        server_app(deploy, print)(grid, SimpleNamespace(run_config={"timeout": 5}))


# docs/deploy.md


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


class Machine:
    """Processes of the page's commands, with other ports, and files in `folder`."""

    def __init__(self, folder):
        self.folder, self.running = folder, {}
        page = (ROOT / "docs/deploy.md").read_text()
        for port in ("8000", "9094", "9095", "9096"):
            page = page.replace(port, free_port())
        blocks = re.findall(r"```(?:sh|toml)\n(.*?)```", page, re.DOTALL)
        lines = [line for block in blocks for line in block.splitlines()]
        self.link, *self.nodes = [shlex.split(line) for line in lines if line.startswith("flower-")]
        (self.run,) = [shlex.split(line) for line in lines if line.startswith("flwr run")]
        home = folder / "home"
        home.mkdir()
        (home / "config.toml").write_text(next(block for block in blocks if block.startswith("[superlink")))
        bin_folder = Path(sys.executable).parent
        self.environment = {**os.environ, "FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0"} | {
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }

    def start(self, name, words):
        options = {"cwd": self.folder, "env": self.environment, "start_new_session": True}
        with open(self.folder / f"{name}.log", "ab") as log:
            self.running[name] = subprocess.Popen(words, stdout=log, stderr=log, **options)

    def kill(self, name):
        process = self.running.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def wait_for_link(self):
        address = ("127.0.0.1", int(self.link[self.link.index("--port") + 1]))
        for _ in range(120):
            with contextlib.suppress(OSError), socket.create_connection(address, timeout=1):
                return
            time.sleep(1)

    def history(self, rounds, seconds=600):
        """Lines of the run's history, as soon as there are so many."""
        path, end = self.folder / "history.jsonl", time.monotonic() + seconds
        while time.monotonic() < end:
            lines = path.read_text().splitlines() if path.exists() else []
            if len(lines) >= rounds:
                return [json.loads(line) for line in lines]
            time.sleep(1)
        pytest.fail(f"no round {rounds}: {(self.folder / 'link.log').read_text()[-3000:]}")


@pytest.mark.slow
def test_the_commands_of_the_page_run_a_federation_whose_client_dies_and_returns(tmp_path, monkeypatch):
    """Its scores are those of the same deployment in this process, where the client is not asked while it is dead."""
    pytest.importorskip("flwr")
    monkeypatch.syspath_prepend(ROOT / "experiments/flower")
    import digits_app

    changed = {"method": "fedper", "rounds": 8, "timeout": 30, "history": str(tmp_path / "history.jsonl")}
    machine = Machine(tmp_path)
    try:
        machine.start("link", machine.link)
        machine.wait_for_link()
        for name, words in enumerate(machine.nodes):
            machine.start(name, words)
        app = [word.replace("experiments/", f"{ROOT}/experiments/") for word in machine.run]
        app[app.index("--run-config") + 1] = " ".join(f"{key}={value!r}" for key, value in changed.items())
        # The test reads the history instead.
        app.remove("--stream")
        subprocess.run(app, cwd=tmp_path, env=machine.environment, check=True)
        machine.history(2)
        machine.kill(1)
        machine.history(4)
        machine.start(1, machine.nodes[1])
        lines = machine.history(8, seconds=1200)
    finally:
        for name in [*machine.running]:
            machine.kill(name)
    assert all(line["arrived"] in ([0, 1, 2], [0, 2]) for line in lines)
    assert lines[0]["arrived"] == lines[1]["arrived"] == lines[-1]["arrived"] == [0, 1, 2]
    assert [0, 2] in [line["arrived"] for line in lines]

    config = tomllib.loads((ROOT / "experiments/flower/pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    deployment = digits_app.deploy(config | changed)

    def ask(requests):
        line = lines[next(iter(requests.values())).round - (next(iter(requests.values())).kind == "evaluate")]
        return {
            client: deployment.answer(client, request, *digits_app.load(config, client), tmp_path / f"{client}.npz")
            for client, request in requests.items()
            if request.kind == "evaluate" or client in line["arrived"]
        }, Traffic(0, 0)

    for line, result in zip(lines, deployment.rounds(ask), strict=True):
        for got, want in zip(line["loss"], result.received["loss"], strict=True):
            # Json has NaN too: the client did not answer.
            assert np.isnan(got) or got == pytest.approx(float(want), rel=1e-3)
