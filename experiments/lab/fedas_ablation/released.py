"""FedAS as its released code runs it: clients align one shared backbone in place, one after another.

    python -m experiments.lab.fedas_ablation.released fashion_mnist --participation 0.2 --out runs/released

In the released code a client aligns the server's own copy of the backbone, and the next client of the cohort receives
what the one before it has left: the last of M clients starts from a backbone with M alignment epochs behind it, each
towards another client. That cannot be said for one client alone, as a method of `pfl_jax` is written. The other choices
of the release are on by default (class means, summed over the classes of a batch; a first alignment with the initial
backbone; traces of batch means; incomplete batches dropped, in a fixed order), and can be given otherwise. All words
after the data set are options of `python -m experiments.DATASET --method fedas`. One device, one client after another,
no checkpoints; the folder is that of any other run.
"""

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from experiments.cli.exit_codes import exit_code, leave
from experiments.cli.request import IN_PLACE, Request, parse
from experiments.papers.settings import RELEASE, check_in_place
from experiments.run import run
from experiments.run.build import Experiment, make_method
from experiments.spec import Options
from pfl_jax import simulate
from pfl_jax.base import ClientData, Cohort, Info, Method, PRNGKey, PyTree, Scores, State, at_round
from pfl_jax.data.federated import FederatedData, client_data
from pfl_jax.engine.cohort import Settings, largest_first
from pfl_jax.engine.mapping import add_up
from pfl_jax.engine.rounds import score_client
from pfl_jax.errors import Diverged, InvalidInput
from pfl_jax.messages import join, split
from pfl_jax.primitives.tree import all_finite, gather, scatter
from pfl_jax.streams import EVALUATION


class Procedure(NamedTuple):
    """Federation whose clients align one backbone in place, as pure functions.

    Attributes:
      init: (FederatedData, key) -> State.
      round: (FederatedData, State, size) -> (State, Cohort, Info); the cohort is in the order of the hand-over.
      evaluate: (FederatedData, State, size) -> Scores [N] of what clients deploy when they receive the backbone, in
        cohorts of `size` clients that hand it on.
    """

    init: Callable[[FederatedData, jax.Array], State]
    round: Callable[[FederatedData, State, int], tuple[State, Cohort, Info]]
    evaluate: Callable[[FederatedData, State, int], Scores]


def procedure(aligned: Method, plain: Method, settings: Settings) -> Procedure:
    """Build FedAS with the alignment in place.

    Cohorts, initial models and batches are those of `pfl_jax.simulate.run` with the same key: where a cohort has one
    client, all results are.

    Args:
      aligned: `pfl_jax.methods.fedas` with the serial alignment towards a client's own features.
      plain: the same without alignment.
      settings: of the cohorts.
    """

    def round_(data, state, size):
        drawn = simulate.sample_cohort(state.key, state.round, data.train_count, size, settings)
        round_key = jax.random.fold_in(state.key, state.round)
        # The key of the aggregation, which FedAS does not use.
        order = jax.random.permutation(jax.random.fold_in(round_key, data.num_clients), size)
        order = largest_first(data.train_count[drawn.clients])[order]
        clients, counts, present = gather((drawn.clients, drawn.counts, drawn.present), order)
        cohort = Cohort(clients, counts, present, data.num_clients)

        def one(backbone, client):
            key = jax.random.fold_in(round_key, client)
            kept, train = gather(state.clients, client), client_data(data, client, "train")
            # Splits the key as the method does within `local`.
            align_key, _ = jax.random.split(key)
            backbone = _received(aligned, align_key, state.server, backbone, kept, train)["backbone"]
            result = plain.local(key, state.server._replace(backbone=backbone), kept, train)
            trained = score_client(plain, result.personal, data, client)
            return backbone, (result.client, split(result.message, jnp.ones((), bool)), trained)

        _, (rows, (messages, terms), trained) = jax.lax.scan(one, state.server.backbone, cohort.clients)
        messages = join(messages, add_up(terms))
        server, rows, info = plain.aggregate(round_key, state.server, rows, messages, cohort)
        clients, trained = scatter((state.clients, state.trained), cohort.clients, (rows, trained))
        return State(server, clients, trained, state.key, state.round + 1), cohort, info

    def init(data, key):
        return simulate.build(aligned, settings).init(data, key)

    return Procedure(init, round_, functools.partial(_evaluate, aligned))


def _received(
    aligned: Method, key: PRNGKey, server: PyTree, backbone: PyTree, kept: PyTree, data: ClientData
) -> PyTree:
    """What a client has when it receives this backbone."""
    return aligned.personalize(key, server._replace(backbone=backbone), kept, data)


def _evaluate(aligned: Method, data: FederatedData, state: State, size: int) -> Scores:
    """See `Procedure`."""
    key = jax.random.fold_in(jax.random.fold_in(state.key, EVALUATION), state.round)
    order = jax.random.permutation(jax.random.fold_in(key, data.num_clients), data.num_clients)

    def one(backbone, place):
        client = order[place]
        # Every cohort begins with the server's backbone.
        start = jax.tree.map(
            lambda first, handed: jnp.where(place % size == 0, first, handed), state.server.backbone, backbone
        )
        kept, train = gather(state.clients, client), client_data(data, client, "train")
        personal = _received(aligned, jax.random.fold_in(key, client), state.server, start, kept, train)
        return personal["backbone"], score_client(aligned, personal, data, client)

    _, scores = jax.lax.scan(one, state.server.backbone, jnp.arange(data.num_clients))
    return jax.tree.map(lambda leaf: leaf[jnp.argsort(order)], scores)


def procedure_of(experiment: Experiment) -> Procedure:
    """Procedure of an experiment with FedAS."""
    plain = make_method(experiment.request, experiment.dataset, alignment=False)
    return procedure(at_round(experiment.method, 0), at_round(plain, 0), experiment.settings)


def released_request(dataset: str, words: Sequence[str]) -> Request:
    """Checked command line: the released code's choices, overridden by the given options.

    Raises:
      InvalidInput: an option that cannot be used here.
    """
    # The choices of the release are options of this method alone.
    usual = ("--preset", "fedas", "--method", "fedas")
    method = parse(dataset, [*usual, *words]).options.method
    if method != "fedas":
        raise InvalidInput(f"the released procedure is of fedas, not {method}")
    request = parse(dataset, [*usual, *RELEASE.words(method), *words])
    check_in_place(request)
    unread = {name: getattr(Options, name) for name in ("state_on", "checkpoint_every")}
    options = dataclasses.replace(request.options, **unread, devices=1, chunk=1, keep_state="never")
    return dataclasses.replace(request, options=options, procedure=IN_PLACE)


def rounds(experiment: Experiment) -> Iterator[simulate.RoundResult]:
    """Run the experiment, round by round.

    Raises:
      Diverged: what a client or the server computed is not finite.
    """
    settings, data = experiment.settings, experiment.data
    assert data.mesh is None
    pure, counts = procedure_of(experiment), np.asarray(data.train_count)
    round_, evaluate = jax.jit(pure.round, static_argnums=2, donate_argnums=1), jax.jit(pure.evaluate, static_argnums=2)
    finite, each_finite = jax.jit(all_finite), jax.jit(jax.vmap(all_finite))
    state = jax.jit(pure.init)(data, jax.random.key(experiment.request.options.seed))
    for number in range(1, settings.rounds + 1):
        began, size = time.perf_counter(), settings.cohort_size(data.num_clients, number - 1)
        state, cohort, info = round_(data, state, size)
        clients, trained = np.asarray(cohort.clients), jax.tree.map(np.array, state.trained)
        broken = clients[~np.asarray(each_finite(gather(state.clients, clients)))]
        if broken.size or not bool(finite((state.server, state.clients))):
            raise Diverged(number, sorted(broken.tolist()))
        received = jax.tree.map(np.asarray, evaluate(data, state, size)) if settings.is_evaluated(number) else None
        yield simulate.RoundResult(
            *(number, state, info, clients, np.ones(size, bool), np.ones(size, bool), received, trained),
            newcomers=None,
            examples=int(counts[clients].sum()),
            seconds=time.perf_counter() - began,
        )


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code, see `exit_codes.exit_code`."""
    words = sys.argv[1:] if words is None else words

    def work() -> None:
        if not words or words[0] in ("-h", "--help"):
            print(__doc__)
            return
        run.run(released_request(words[0], words[1:]), Console(), rounds=rounds)

    return exit_code(work)


if __name__ == "__main__":
    leave(main())
