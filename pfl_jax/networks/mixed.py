"""Clients with different networks: one method for all of them, with a common size of features and a common head."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pfl_jax.base import Method, Model, PyTree
from pfl_jax.errors import InvalidInput
from pfl_jax.networks.layers import Dense
from pfl_jax.schedules import Mixed
from pfl_jax.validation import check_value

LAYER = "to_features"
"""Key of the layer of `with_features` in a backbone."""


def mixed(
    make: Callable[[Model], Method],
    models: Sequence[Model],
    network: Sequence[int] | None = None,
    *,
    features: int | None = None,
) -> Mixed:
    """Method for clients that have different networks, for `pfl_jax.run` and `pfl_jax.sweep`.

    Clients with the same network are trained together, and the server takes the messages of all. This works for methods
    whose messages do not depend on the network: `local`; methods that share only the head (`lg_fedavg`, `fedgh`), class
    means of features (`fedproto_g`, `fedtgp`) or outputs (`fd`); and methods with a second model beside each client's
    own (`fml`, `fedkd`, `fedmrl`), which has the first network unless `Model.shared` names another. For other methods a
    run reports that they need equal parameters. All networks begin with the head of the first one, if shapes are equal.

    Random numbers of a client do not depend on its network, and with one network the results equal those of
    `make(models[0])`, bit for bit.

    Args:
      make: function that maps a model to the method, such as functools.partial(make_method, "fedproto_g").
      models: networks for the same inputs and task.
      network: position in `models` of each client's network, [N]; None deals them out in turn: client i has network i
        mod len(models).
      features: common number of features: networks with another number get a layer, see `with_features`. None leaves
        all networks unchanged.

    Raises:
      InvalidInput: the networks differ in their outputs or have frozen parameters, the method asks all clients before
        the first round (`feddbe`), or a client has none of the networks.

    Example:
      >>> import functools, jax
      >>> import pfl_jax
      >>> from pfl_jax import data, models
      >>> dataset = data.load("digits")
      >>> federation = data.federate(dataset, data.partition.iid(dataset, num_clients=4, train_size=20, test_size=10))
      >>> networks = [make(dataset.input_shape, dataset.num_classes) for make in (models.mlp, models.resnet8)]
      >>> make = functools.partial(pfl_jax.make_method, "fedproto_g", lr=0.1)
      >>> method = pfl_jax.mixed(make, networks, features=32)
      >>> *_, last = pfl_jax.run(method, federation, pfl_jax.Settings(rounds=1), jax.random.key(0))
      >>> last.received["accuracy"].shape, len(last.state.clients)
      ((4,), 2)
    """
    if not models:
        raise InvalidInput("mixed needs at least one network")
    for model in models:
        check_value("each of models", model, Model)
        if (model.num_classes, model.task.name) != (models[0].num_classes, models[0].task.name):
            raise InvalidInput(f"the networks of one federation have the same outputs, not {models[0]} and {model}")
        if model.frozen is not None and len(models) > 1:
            raise InvalidInput("networks with frozen parameters (adapters) are for federations of one network")
    if len(models) > 1:
        models = [model._replace(shared=model.shared or models[0]) for model in models]
    if features is not None:
        models = [with_features(model, features) for model in models]
    methods = tuple(make(_with_head(model, models[0])) for model in models)
    if len(models) > 1 and any(method.survey is not None for method in methods):
        raise InvalidInput("this method asks all clients before the first round, and is for federations of one network")
    positions = None if network is None else tuple(np.asarray(network).tolist())
    if positions is not None and not set(positions) <= set(range(len(models))):
        raise InvalidInput(f"network has positions of {len(models)} networks, from 0, not {sorted(set(positions))}")
    return Mixed(methods, positions)


def with_features(model: Model, features: int, layer: str = LAYER) -> Model:
    """Model with another number of features: a dense layer with ReLU on top of its backbone, below a new dense head.

    Args:
      model: any model whose backbone is a dictionary; a model that has this number already is returned unchanged.
      features: number of features d of the new model.
      layer: key of the layer in the backbone.

    Example:
      >>> from pfl_jax import models
      >>> from pfl_jax.networks import with_features
      >>> with_features(models.mlp((8, 8, 1), 10), 128)
      Model(128 features -> 10 outputs, task classification)
    """
    if model.num_features == features:
        return model
    if not model.num_features:
        raise InvalidInput("a model without features gets no further layer: split it afterwards")
    dense, head, inside = Dense(features), Dense(model.num_classes), model.batch_features

    def init(key):
        keys = jax.random.split(key, 3)
        backbone = model.init(keys[0])["backbone"]
        if not isinstance(backbone, dict) or layer in backbone:
            raise InvalidInput("a layer for features is for backbones that are dictionaries without one")
        added = dense.init(keys[1], jnp.zeros((1, model.num_features)))["params"]
        return {
            "backbone": {**backbone, layer: added},
            "head": head.init(keys[2], jnp.zeros((1, features)))["params"],
        }

    def on_top(backbone: PyTree, below: jax.Array) -> jax.Array:
        above = dense.apply({"params": backbone[layer]}, below)
        assert isinstance(above, jax.Array)
        return jax.nn.relu(above)

    def own(backbone: PyTree) -> PyTree:
        return {name: part for name, part in backbone.items() if name != layer}

    def batch_features(backbone, inputs, mask, key):
        assert inside is not None
        below, statistics = inside(own(backbone), inputs, mask, key)
        return on_top(backbone, below), statistics

    return model._replace(
        init=init,
        features=lambda backbone, inputs: on_top(backbone, model.features(own(backbone), inputs)),
        classify=lambda params, above: head.apply({"params": params}, above),
        num_features=features,
        batch_features=None if inside is None else batch_features,
    )


def _with_head(model: Model, first: Model) -> Model:
    """Model that begins with the head of the first model, if the shapes are equal."""

    def shapes(one: Model) -> PyTree:
        head = jax.eval_shape(one.init, jax.random.key(0))["head"]
        return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), head)

    if model is first or shapes(model) != shapes(first):
        return model
    return model._replace(init=lambda key: model.init(key) | {"head": first.init(key)["head"]})
