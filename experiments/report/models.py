"""Features of the clients' models, of runs that kept their state: the part of a report that loads models."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from experiments.folder.stored_runs import Group
from experiments.run.loaded_run import LoadedRun, load_run
from experiments.show.panels import MARKERS, Scatter
from experiments.show.pictures import Picture
from pfl_jax.errors import InvalidInput

MOST_EXAMPLES = 60
"""Test examples of a client that are shown, the first ones."""


def features(groups: Sequence[Group]) -> list[Picture]:
    """Charts of the features of the first run of each group; one without a drawing says why others have none."""
    charts, remarks = [], []
    for group in groups:
        run = next((run for run in group.counted if run.summary is not None), None)
        if run is None:
            continue
        try:
            charts.append(_features(load_run(run.path), f"{group.label}, seed {run.seed}"))
        except InvalidInput as error:
            remarks.append(f"{group.label}: {error}.")
    return charts + ([Picture("Without features", " ".join(remarks), [])] if remarks else [])


def _features(run: LoadedRun, name: str) -> Picture:
    # Imported now: most reports do without it.
    from sklearn.decomposition import PCA

    if not run.model.num_features:
        raise InvalidInput("its model has no features")
    rows: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    clients = np.unique(np.linspace(0, run.data.num_clients - 1, len(MARKERS)).round().astype(int)).tolist()
    for client in clients:
        data = run.client_data(client)
        inputs: Any = jax.tree.map(lambda leaf: leaf[:MOST_EXAMPLES], data.x)
        found = np.asarray(run.model.features(run.params(client)["backbone"], inputs))
        if found.ndim != 2 or np.ndim(data.y) != 1 or not np.issubdtype(np.asarray(data.y).dtype, np.integer):
            raise InvalidInput("features are drawn by class, and these examples have none")
        rows.append(found)
        labels.append(np.asarray(data.y)[:MOST_EXAMPLES])
    analysis = PCA(2).fit(np.concatenate(rows))
    share = 100 * analysis.explained_variance_ratio_
    panel = Scatter(
        name,
        f"first component, {share[0]:.0f} % of the variance",
        f"second component, {share[1]:.0f} %",
        [analysis.transform(found).tolist() for found in rows],
        [classes.tolist() for classes in labels],
        [f"client {client}" for client in clients],
    )
    words = "Features of test examples, each by its own client's model, in the two principal components of all; colors "
    return Picture(name, words + "are classes, shapes are clients.", [panel])
