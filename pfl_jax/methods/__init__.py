"""Registry of all methods: `METHODS["fedpac"]` and `pfl_jax.methods.fedpac` are the same factory.

A new method needs one file in this folder and one line in METHODS. The name of a method always refers to its factory,
whichever way it is imported: `import pfl_jax.methods.fedper as one`, `from pfl_jax.methods import fedper` and
`from pfl_jax.methods.fedper import fedper` give the same function. Other names in these files, such as FedPAC's
prototype weights, are imported from the file itself: `from pfl_jax.methods.fedpac_proto import prototype_weights`.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from pfl_jax.base import Method, Model
from pfl_jax.errors import InvalidInput
from pfl_jax.methods.afl import afl as afl
from pfl_jax.methods.apfl import apfl as apfl
from pfl_jax.methods.apple import apple as apple
from pfl_jax.methods.cd2pfed import cd2pfed as cd2pfed
from pfl_jax.methods.cfl import cfl as cfl
from pfl_jax.methods.cyclic_weight_transfer import cyclic_weight_transfer as cyclic_weight_transfer
from pfl_jax.methods.dfedavgm import dfedavgm as dfedavgm
from pfl_jax.methods.dfedpgp import dfedpgp as dfedpgp
from pfl_jax.methods.dispfl import dispfl as dispfl
from pfl_jax.methods.ditto import ditto as ditto
from pfl_jax.methods.dsgd import dsgd as dsgd
from pfl_jax.methods.factories import RECIPES, annotations, check_hyper_parameters, default_training, recipes_of
from pfl_jax.methods.fd import fd as fd
from pfl_jax.methods.fedala import fedala as fedala
from pfl_jax.methods.fedamp import fedamp as fedamp
from pfl_jax.methods.fedas import fedas as fedas
from pfl_jax.methods.fedas_cd2 import fedas_cd2 as fedas_cd2
from pfl_jax.methods.fedavg import fedavg as fedavg
from pfl_jax.methods.fedavg_ft import fedavg_ft as fedavg_ft
from pfl_jax.methods.fedbabu import fedbabu as fedbabu
from pfl_jax.methods.fedbn import fedbn as fedbn
from pfl_jax.methods.fedcac import fedcac as fedcac
from pfl_jax.methods.fedcp import fedcp as fedcp
from pfl_jax.methods.feddbe import feddbe as feddbe
from pfl_jax.methods.feddpa import feddpa as feddpa
from pfl_jax.methods.feddyn import feddyn as feddyn
from pfl_jax.methods.fedem import fedem as fedem
from pfl_jax.methods.fedem_ft import fedem_ft as fedem_ft
from pfl_jax.methods.fedex_lora import fedex_lora as fedex_lora
from pfl_jax.methods.fedfomo import fedfomo as fedfomo
from pfl_jax.methods.fedgen import fedgen as fedgen
from pfl_jax.methods.fedgh import fedgh as fedgh
from pfl_jax.methods.fedkd import fedkd as fedkd
from pfl_jax.methods.fedlwf import fedlwf as fedlwf
from pfl_jax.methods.fedmrl import fedmrl as fedmrl
from pfl_jax.methods.fednh import fednh as fednh
from pfl_jax.methods.fedpac import fedpac as fedpac
from pfl_jax.methods.fedpac_proto import fedpac_proto as fedpac_proto
from pfl_jax.methods.fedper import fedper as fedper
from pfl_jax.methods.fedphp import fedphp as fedphp
from pfl_jax.methods.fedproto import fedproto_g as fedproto_g
from pfl_jax.methods.fedproto import fedproto_l as fedproto_l
from pfl_jax.methods.fedprox import fedprox as fedprox
from pfl_jax.methods.fedprox_ft import fedprox_ft as fedprox_ft
from pfl_jax.methods.fedrep import fedrep as fedrep
from pfl_jax.methods.fedreplay import fedreplay as fedreplay
from pfl_jax.methods.fedrod import fedrod as fedrod
from pfl_jax.methods.fedsa_lora import fedsa_lora as fedsa_lora
from pfl_jax.methods.fedsam import fedsam as fedsam
from pfl_jax.methods.fedselect import fedselect as fedselect
from pfl_jax.methods.fedtgp import fedtgp as fedtgp
from pfl_jax.methods.flexlora import flexlora as flexlora
from pfl_jax.methods.floco import floco as floco
from pfl_jax.methods.flora import flora as flora
from pfl_jax.methods.flute import flute as flute
from pfl_jax.methods.fml import fml as fml
from pfl_jax.methods.gpfl import gpfl as gpfl
from pfl_jax.methods.hetlora import hetlora as hetlora
from pfl_jax.methods.hypcluster import hypcluster as hypcluster
from pfl_jax.methods.knn_per import knn_per as knn_per
from pfl_jax.methods.lg_fedavg import lg_fedavg as lg_fedavg
from pfl_jax.methods.local import local as local
from pfl_jax.methods.moon import moon as moon
from pfl_jax.methods.osgp import osgp as osgp
from pfl_jax.methods.pefll import pefll as pefll
from pfl_jax.methods.per_fedavg import per_fedavg as per_fedavg
from pfl_jax.methods.pfedfda import pfedfda as pfedfda
from pfl_jax.methods.pfedgraph import pfedgraph as pfedgraph
from pfl_jax.methods.pfedhn import pfedhn as pfedhn
from pfl_jax.methods.pfedme import pfedme as pfedme
from pfl_jax.methods.qffl import qffl as qffl
from pfl_jax.methods.scaffold import scaffold as scaffold
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.validation import check_value, unknown

_FACTORIES = (
    *(local, fedavg, fedavg_ft, fedprox, fedprox_ft, scaffold, moon, feddyn, cyclic_weight_transfer, qffl, afl),
    *(fedlwf, fedreplay, fedsam, fednh),
    *(per_fedavg, fedper, fedbn, lg_fedavg, fedrep, fedbabu, flute, fedrod, feddbe, fedcp, gpfl, knn_per, apfl, pfedme),
    *(ditto, fedfomo, fedamp, apple, hypcluster, cfl, fedem, fedem_ft, floco),
    *(fedproto_g, fedproto_l, fedgh, fedtgp, fd),
    *(fml, fedkd, fedmrl, fedphp, fedgen, fedala, pfedhn, pefll, pfedgraph, fedcac, fedselect, cd2pfed, fedpac),
    *(fedpac_proto, pfedfda, fedas, fedas_cd2, dsgd, dfedavgm, osgp, dispfl, dfedpgp, feddpa, fedex_lora, hetlora),
    *(fedsa_lora, flora, flexlora),
)

METHODS: dict[str, Callable[..., Method]] = {factory.__name__: factory for factory in _FACTORIES}
"""name -> factory(model, training: LocalTraining, **hyper-parameters) -> Method

Each raises InvalidInput for a value of a wrong type or out of its range, see `pfl_jax.validation`."""


def factory_of(method: str | Callable[..., Method]) -> Callable[..., Method]:
    """Factory of a `method` by its name in METHODS, InvalidInput for an unknown one; a factory itself, unchanged."""
    if not isinstance(method, str):
        return method
    if method not in METHODS:
        raise InvalidInput(unknown("method", method, METHODS))
    return METHODS[method]


def make_method(
    method: str | Callable[..., Method], model: Model, training: LocalTraining | None = None, **values: Any
) -> Method:
    """Build a method from one flat set of hyper-parameters: its own, and the fields of LocalTraining and of wrappers.

    Args:
      method: a name in METHODS, or a factory with the same kind of signature.
      model: the model that clients train.
      training: recipe of local training; None for the method's default. Fields among `values` replace its fields.
      **values: hyper-parameters, see `hyper_parameters`; the others have the method's defaults.

    Raises:
      InvalidInput: an unknown method or hyper-parameter, or a value of a wrong type or out of its range.

    Example:
      >>> from pfl_jax import make_method, models
      >>> model = models.mlp((8, 8, 1), 10)
      >>> method = make_method("ditto", model, lr=0.05, epochs=1, lam=0.5)  # LocalTraining(lr=0.05, epochs=1), lam=0.5
    """
    factory = factory_of(method)
    if callable(lr := values.get("lr")):
        schedule: Any = lambda index: make_method(method, model, training, **(values | {"lr": lr(index)}))  # noqa: E731
        return schedule
    check_value("model", model, Model)
    check_hyper_parameters(factory, values, annotations(factory))
    recipe = {field.name for field in fields(LocalTraining)} & values.keys()
    check_value("training", training, LocalTraining | None)
    training = training or default_training(factory)
    # Copied only for changes: a copy no longer counts as a plain LocalTraining(), about which factories warn.
    training = training.replace(**{name: values.pop(name) for name in recipe}) if recipe else training
    recipes = [
        recipe(**{field.name: values.pop(field.name) for field in fields(recipe) if field.name in values})
        for recipe in recipes_of(factory)
    ]
    made = factory(model, training=training, **values)
    for recipe in recipes:
        made = RECIPES[type(recipe)](made, recipe)
    return made
