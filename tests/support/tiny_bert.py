"""A BERT encoder of a few hundred random weights, in the files that Hugging Face distributes."""

import json

import numpy as np

from pfl_jax.networks.pretrained import NAMES, BertConfig

SIZES = BertConfig(vocabulary=30, width=8, layers=3, heads=2, hidden=12, positions=9)


def hugging_face_weights(rng):
    """Random weights of a BertModel of these sizes, under the names of its files."""
    width, hidden = SIZES.width, SIZES.hidden
    shapes = {"words": (SIZES.vocabulary, width), "positions": (SIZES.positions, width), "segments": (2, width)}
    found = {f"{NAMES[part]}.weight": rng.normal(size=shape) for part, shape in shapes.items()}

    def add(name, outputs, inputs=None):
        found[f"{name}.weight"] = rng.normal(size=(outputs,) if inputs is None else (outputs, inputs))
        found[f"{name}.bias"] = rng.normal(size=outputs)

    add(NAMES["norm"], width)
    for layer in range(SIZES.layers):
        for part in ("query", "key", "value", "attention_output"):
            add(f"encoder.layer.{layer}.{NAMES[part]}", width, width)
        for part in ("attention_norm", "output_norm"):
            add(f"encoder.layer.{layer}.{NAMES[part]}", width)
        add(f"encoder.layer.{layer}.{NAMES['intermediate']}", hidden, width)
        add(f"encoder.layer.{layer}.{NAMES['output']}", width, hidden)
    return {name: array.astype(np.float32) for name, array in found.items()}


def write_bert(folder):
    """Weights and sizes in a folder: the path of the weights, and the weights by name."""
    found = hugging_face_weights(np.random.default_rng(0))
    np.savez(folder / "model.npz", **found)
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    sizes = dict(zip((*names, "max_position_embeddings", "layer_norm_eps"), SIZES, strict=False))
    (folder / "config.json").write_text(json.dumps(sizes))
    return folder / "model.npz", found
