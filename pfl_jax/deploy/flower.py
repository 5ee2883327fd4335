"""Server and clients as apps of Flower, by its Message API. Needs flwr, `pip install "pfl_jax[flower]"`.

The sums of `pfl_jax.base.Mean` are plain: Flower's secure aggregation is for its older interface of strategies only.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from pfl_jax.atomic_write import make_folder
from pfl_jax.base import ClientData
from pfl_jax.deploy.deployment import Arrays, DeployedRound, Deployment, Request
from pfl_jax.engine.communication import Traffic
from pfl_jax.errors import InvalidInput, imported

Config: TypeAlias = Mapping[str, Any]
"""Configuration of a run: [tool.flwr.app.config] of the app's pyproject.toml, and `flwr run --run-config`."""

logger = logging.getLogger("flwr")


def client_app(
    deploy: Callable[[Config], Deployment], load: Callable[[Config, int], tuple[ClientData, ClientData]]
) -> Any:
    """ClientApp of Flower for a method.

    Each SuperNode is one client. Its node configuration has the client's number from 0, partition-id, and the folder of
    its state, state-folder, which gets one file for each run.

    Args:
      deploy: function that makes the run's `Deployment`, the same at all clients and the server.
      load: function that gives a client's examples for training and for tests.
    """
    flower, app = _flower("app"), _flower("clientapp").ClientApp()

    @app.query()
    def number(message, context):
        content = flower.RecordDict({"client": flower.ConfigRecord({"number": _node(context)[0]})})
        return flower.Message(content, reply_to=message)

    @app.train()
    @app.evaluate()
    def answer(message, context):
        (client, folder), content = _node(context), message.content
        kind = "train" if message.metadata.message_type == "train" else "evaluate"
        asked = content.config_records["request"]
        request = Request(kind, asked["round"], asked["arrived"], _arrays(content.array_records["arrays"]))
        file, data = folder / f"{context.run_id}-{client}.npz", load(context.run_config, client)
        answered = deploy(context.run_config).answer(client, request, *data, file)
        return flower.Message(flower.RecordDict({"arrays": _record(answered)}), reply_to=message)

    return app


def server_app(deploy: Callable[[Config], Deployment], report: Callable[[Config, DeployedRound], object]) -> Any:
    """ServerApp of Flower for a method; it waits for all clients, and then begins.

    An exchange waits for `timeout` seconds of the configuration, by default 600. Clients that did not answer by then,
    including those whose SuperNode is not connected or whose app failed, are absent.

    Args:
      deploy: see `client_app`.
      report: function of the configuration and a round's result, called after each round.
    """
    app = _flower("serverapp").ServerApp()

    @app.main()
    def main(grid, context):
        deployment, nodes = deploy(context.run_config), _Nodes(grid, context.run_config.get("timeout", 600))
        while missing := {*range(deployment.num_clients)} - nodes.connected().keys():
            logger.info("waiting for clients %s", sorted(missing))
            time.sleep(1)
        for result in deployment.rounds(nodes.ask):
            report(context.run_config, result)

    return app


class _Nodes:
    """Clients' SuperNodes as the server reaches them by Flower's `grid`, waiting at most `timeout` seconds."""

    def __init__(self, grid: Any, timeout: float):
        self._grid, self._timeout, self._flower = grid, timeout, _flower("app")
        self._clients: dict[int, int] = {}

    def connected(self) -> dict[int, int]:
        """Client number -> node; for a client that was restarted, its last node."""
        nodes = list(self._grid.get_node_ids())
        unknown = [
            self._message(self._flower.RecordDict(), node, "query") for node in nodes if node not in self._clients
        ]
        for node, reply in self._exchange(unknown).items():
            self._clients[node] = reply.config_records["client"]["number"]
        return {client: node for node, client in self._clients.items() if node in nodes}

    def ask(self, requests: dict[int, Request]) -> tuple[dict[int, Arrays], Traffic]:
        """Bring requests to clients, see `pfl_jax.deploy.deployment.Ask`; bytes are of the serialized arrays."""
        nodes, messages = self.connected(), []
        for client, request in requests.items():
            if client in nodes:
                config = self._flower.ConfigRecord({"round": request.round, "arrived": request.arrived})
                content = self._flower.RecordDict({"request": config, "arrays": _record(request.arrays)})
                messages.append(self._message(content, nodes[client], request.kind))
        replies = {node: reply.array_records["arrays"] for node, reply in self._exchange(messages).items()}
        answers = {self._clients[node]: _arrays(record) for node, record in replies.items()}
        down = _size(message.content.array_records["arrays"] for message in messages)
        return answers, Traffic(up=_size(replies.values()), down=down)

    def _message(self, content: Any, node: int, kind: str) -> Any:
        # A node that comes back later does not get the message.
        return self._flower.Message(content, node, kind, ttl=self._timeout)

    def _exchange(self, messages: list[Any]) -> dict[int, Any]:
        """Node -> content of its reply, for replies without errors that arrive in time."""
        replies = list(self._grid.send_and_receive(messages, timeout=self._timeout)) if messages else []
        for reply in replies:
            if reply.has_error():
                logger.warning("no answer of node %s: %s", reply.metadata.src_node_id, reply.error)
        return {reply.metadata.src_node_id: reply.content for reply in replies if not reply.has_error()}


def _flower(name: str) -> Any:
    """Module of Flower; it is imported when an app is made."""
    return imported(f"flwr.{name}", "Flower is missing: pip install 'pfl_jax[flower]'")


def _node(context: Any) -> tuple[int, Path]:
    """A client's number and the folder of its state."""
    client, folder = (context.node_config.get(name) for name in ("partition-id", "state-folder"))
    if not isinstance(client, int) or not isinstance(folder, str):
        raise InvalidInput("start the SuperNode with --node-config \"partition-id=0 state-folder='FOLDER'\"")
    make_folder(Path(folder))
    return client, Path(folder)


def _record(arrays: Arrays) -> Any:
    flower = _flower("app")
    return flower.ArrayRecord({name: flower.Array(array) for name, array in arrays.items()})


def _arrays(record: Any) -> Arrays:
    return {name: array.numpy() for name, array in record.items()}


def _size(records: Iterable[Any]) -> int:
    """Bytes of the serialized arrays of all records."""
    return sum(len(array.data) for record in records for array in record.values())
