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
from pfl_jax.errors import InvalidInput

Config: TypeAlias = Mapping[str, Any]
"""Configuration of a run: [tool.flwr.app.config] of the app's pyproject.toml, and `flwr run --run-config`."""

logger = logging.getLogger("flwr")


def client_app(
    deploy: Callable[[Config], Deployment], load: Callable[[Config, int], tuple[ClientData, ClientData]]
) -> Any:
    """`flwr.clientapp.ClientApp` of a method.

    Each SuperNode is one client. Its node configuration has the client's number, partition-id, from 0, and the folder
    of its state, state-folder, which has one file for each run.

    Args:
      deploy: function that makes the run's `Deployment`, the same at all clients and the server.
      load: function that gives a client's examples for training and for tests.
    """
    from flwr.app import ConfigRecord, Context, Message, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.query()
    def number(message: Message, context: Context) -> Message:
        return Message(RecordDict({"client": ConfigRecord({"number": _node(context)[0]})}), reply_to=message)

    def answer(message: Message, context: Context) -> Message:
        client, folder = _node(context)
        asked, arrays = message.content.config_records["request"], message.content.array_records["arrays"]
        kind = "train" if message.metadata.message_type == "train" else "evaluate"
        request = Request(kind, asked["round"], asked["arrived"], {name: one.numpy() for name, one in arrays.items()})
        file = folder / f"{context.run_id}-{client}.npz"
        answered = deploy(context.run_config).answer(client, request, *load(context.run_config, client), file)
        return Message(RecordDict({"arrays": _record(answered)}), reply_to=message)

    app.train()(answer)
    app.evaluate()(answer)
    return app


def server_app(
    deploy: Callable[[Config], Deployment], report: Callable[[Config, DeployedRound], object], *, timeout: float = 600
) -> Any:
    """`flwr.serverapp.ServerApp` of a method; it waits for all clients, and then begins.

    Args:
      deploy: see `client_app`.
      report: function of the configuration and a round's result, called after each round.
      timeout: seconds for which a round waits for answers. Clients without one, also those whose SuperNode is not
        connected or whose app failed, are absent in the round.
    """
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        deployment, nodes = deploy(context.run_config), _Nodes(grid, timeout)
        while missing := {*range(deployment.num_clients)} - nodes.connected().keys():
            logger.info("waiting for clients %s", sorted(missing))
            time.sleep(1)
        for result in deployment.rounds(nodes.ask):
            report(context.run_config, result)

    return app


class _Nodes:
    """Clients' SuperNodes, as the server reaches them.

    Args:
      grid: Flower's connection to the SuperNodes.
      timeout: seconds that an exchange takes at most.
    """

    def __init__(self, grid: Any, timeout: float):
        self._grid = grid
        self._timeout = timeout
        self._clients: dict[int, int] = {}

    def connected(self) -> dict[int, int]:
        """Client number -> node; of a client that was started anew, the node that came last."""
        from flwr.app import Message, RecordDict

        nodes = list(self._grid.get_node_ids())
        unknown = [Message(RecordDict(), node, "query") for node in nodes if node not in self._clients]
        for reply in self._exchange(unknown):
            self._clients[reply.metadata.src_node_id] = int(reply.content.config_records["client"]["number"])
        return {client: node for node, client in self._clients.items() if node in nodes}

    def ask(self, requests: dict[int, Request]) -> tuple[dict[int, Arrays], Traffic]:
        """Bring requests to clients, see `pfl_jax.deploy.deployment.Ask`; bytes are those of the serialized arrays."""
        from flwr.app import ConfigRecord, Message, RecordDict

        nodes, messages = self.connected(), []
        for client, request in requests.items():
            if client in nodes:
                config = ConfigRecord({"round": request.round, "arrived": request.arrived})
                content = RecordDict({"request": config, "arrays": _record(request.arrays)})
                messages.append(Message(content, nodes[client], request.kind, ttl=self._timeout))
        replies = self._exchange(messages)
        found = {self._clients[reply.metadata.src_node_id]: reply.content.array_records["arrays"] for reply in replies}
        answers = {client: {name: one.numpy() for name, one in record.items()} for client, record in found.items()}
        down = _size(message.content.array_records["arrays"] for message in messages)
        return answers, Traffic(up=_size(found.values()), down=down)

    def _exchange(self, messages: list[Any]) -> list[Any]:
        """Replies without errors that arrive in time."""
        replies = list(self._grid.send_and_receive(messages, timeout=self._timeout)) if messages else []
        for reply in replies:
            if reply.has_error():
                logger.warning("no answer of node %s: %s", reply.metadata.src_node_id, reply.error)
        return [reply for reply in replies if not reply.has_error()]


def _node(context: Any) -> tuple[int, Path]:
    """A client's number and the folder of its state."""
    client, folder = (context.node_config.get(name) for name in ("partition-id", "state-folder"))
    if not isinstance(client, int) or not isinstance(folder, str):
        raise InvalidInput("start the SuperNode with --node-config \"partition-id=0 state-folder='FOLDER'\"")
    make_folder(Path(folder))
    return client, Path(folder)


def _record(arrays: Arrays) -> Any:
    from flwr.app import Array, ArrayRecord

    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def _size(records: Iterable[Any]) -> int:
    """Bytes of the serialized arrays of all records."""
    return sum(len(array.data) for record in records for array in record.values())
