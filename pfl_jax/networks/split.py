"""Another split of a model's parameters, by their paths, into a shared part and a part that each client keeps."""

import re
from dataclasses import dataclass

import jax

from pfl_jax.base import STATISTICS, Backbone, Head, Model, Params, PyTree
from pfl_jax.errors import NO_FEATURES, InvalidInput


def split(model: Model, *, personal: str) -> Model:
    """Model whose head is the parameters that a regular expression finds, and whose backbone is all other parameters.

    A method that shares backbones and keeps heads then keeps the `personal` ones: FedPer on low-rank adapters with
    personal="lora_b|^head" is FedSA-LoRA (`pfl_jax.methods.fedsa_lora`). The head need not be the model's last step, so
    there are no features: a method that uses them as vectors, such as FedPAC, is refused when it runs.

    Args:
      model: any model without batch normalization in training.
      personal: regular expression searched for in the paths of the parameters, "backbone/fc2/lora_b" or "head/kernel".

    Returns:
      The model; its parameters are {"backbone": {path: leaf}, "head": {path: leaf}}.

    Raises:
      InvalidInput: personal is not a regular expression, or finds no parameters or all of them; the model has running
        statistics that its training changes.

    Example:
      >>> import jax
      >>> from pfl_jax import models, networks
      >>> model = networks.split(models.mlp((64,), 10), personal="fc2/bias|^head")
      >>> sorted(jax.eval_shape(model.init, jax.random.key(0))["head"])
      ['backbone/fc2/bias', 'head/bias', 'head/kernel']

    Reference:
      Guo, Zeng, Wang, Fan, Wang, Qu. Selective Aggregation for Low-Rank Adaptation in Federated Learning. ICLR 2025,
      Section 4 (FedSA-LoRA).
    """
    pattern = pattern_of("personal", personal)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    keyed, structure = jax.tree.flatten_with_path(shapes)
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in keyed]
    if any(STATISTICS in path.split("/") for path in paths):
        # Statistics would be trained as parameters: a loss returns new ones for a backbone, which a split model lacks.
        raise InvalidInput("the model has running statistics of batch normalization: split one without, or freeze them")
    own = [path for path in paths if pattern.search(path)]
    if not own or len(own) == len(paths):
        raise InvalidInput(
            f"personal {personal!r} finds {'all' if own else 'none'} of the parameters: {', '.join(paths)}"
        )

    def init(key):
        leaves = dict(zip(paths, jax.tree.leaves(model.init(key)), strict=True))
        return {
            "backbone": {path: leaf for path, leaf in leaves.items() if path not in own},
            "head": {path: leaves[path] for path in own},
        }

    def joined(backbone: Backbone, head: Head) -> Params:
        leaves = backbone | head
        return structure.unflatten(leaves[path] for path in paths)

    def batch_features(backbone, x, mask, key):
        return Unfinished((backbone, x, mask, key)), {}

    def classify(head, features):
        if not isinstance(features, Unfinished):
            raise InvalidInput(NO_FEATURES)
        backbone, x, *training = features.parts
        params = joined(backbone, head)
        if not training or model.batch_features is None:
            return model.apply(params, x)
        return model.classify(params["head"], model.batch_features(params["backbone"], x, *training)[0])

    return model._replace(
        init=init,
        features=lambda backbone, x: Unfinished((backbone, x)),
        classify=classify,
        num_features=0,
        batch_features=None if model.batch_features is None else batch_features,
    )


def pattern_of(name: str, text: str) -> re.Pattern[str]:
    """Regular expression of an argument; InvalidInput if the text is not one.

    Args:
      name: name of the argument.
      text: the expression.
    """
    try:
        return re.compile(text)
    except re.error as error:
        raise InvalidInput(f"{name} {text!r} is not a regular expression: {error}") from None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Unfinished:
    """Stand-in for features [B, d] until `Model.classify` gets the other parameters.

    Attributes:
      parts: the backbone and the inputs; in training the mask and the key too.
    """

    parts: PyTree
