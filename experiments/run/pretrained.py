"""Pretrained models and adapters of the command line, and the states below them, which are computed once."""

import hashlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import Progress

from experiments.folder.run_folder import digest as digest_of
from experiments.host.console import print_line
from experiments.host.jax_config import cache_folder
from experiments.spec.choices import ADAPTERS, TEXTS
from experiments.spec.options import Options
from experiments.spec.own_code import read, weights_file
from pfl_jax.atomic_write import make_folder, write_binary
from pfl_jax.base import Model
from pfl_jax.data.sources import Dataset
from pfl_jax.data.texts import FOLDER, fortunes
from pfl_jax.errors import InvalidInput
from pfl_jax.networks import adapters
from pfl_jax.networks.pretrained import bert, bert_states, minilm_folder, read_config
from pfl_jax.networks.split import split
from pfl_jax.networks.vit import vit

MOST_STATES = 2**32
"""Bytes that the states of all examples may take; larger ones are computed in every step."""


def texts(options: Options) -> Dataset:
    """The texts, as tokens of the model."""
    if options.source not in ("auto", "files"):
        raise InvalidInput(f"--source {options.source}: {TEXTS} are read from files, apt-get install fortunes")
    return fortunes(weights_of(options).parent / "tokenizer.json", folder=options.data_dir or FOLDER)


def weights_of(options: Options) -> Path:
    """File of the pretrained weights."""
    return weights_file(str(minilm_folder()) if options.weights is None else options.weights)


def digest(options: Options) -> str:
    """Digest of the file of the pretrained weights, 16 hexadecimal digits."""
    return digest_of(read(weights_of(options)))


def model_of(options: Options, dataset: Dataset, outputs: int) -> Model:
    """Pretrained model for the examples of a dataset: images, tokens [T], or states [T, d] of `with_states`."""
    if options.model == "vit":
        if options.weights is None:
            raise InvalidInput("--model vit needs --weights, a file of timm or big_vision")
        return vit(dataset.input_shape, outputs, path=options.weights)
    if len(dataset.input_shape) == 2:
        return bert(weights_of(options), dataset.input_shape[0], outputs, first=frozen_layers(options))
    if len(dataset.input_shape) != 1 or dataset.train_x.dtype.kind not in "iu":
        raise InvalidInput(
            f"--model {options.model} is for tokens, integers [T], not for inputs {dataset.train_x.dtype} "
            f"{list(dataset.input_shape)}"
        )
    return bert(weights_of(options), dataset.input_shape[0], outputs)


def adapted(options: Options, model: Model, input_shape: tuple[int, ...], dtype: Any) -> Model:
    """Model with the adapters and the split of the options."""
    kind, number = ADAPTERS.parse(options.adapter, "--adapter")
    if kind != "none":
        size = int(number or 0)
        kinds: dict[str, Any] = {"input_dtype": dtype, "frozen_dtype": options.frozen_dtype}
        where: dict[str, Any] = kinds | {"targets": options.targets or ""}
        if kind == "linear_probe":
            model = adapters.linear_probe(model, input_shape, **kinds)
        elif kind == "prompts":
            if options.model != "bert":
                raise InvalidInput(f"--adapter prompts is for --model bert, not {options.model}")
            model = adapters.prompts(model, input_shape, tokens=size, **kinds)
        elif kind == "bottleneck":
            model = adapters.bottleneck(model, input_shape, size=size, **where)
        else:
            # The same for all seeds, as all else that is frozen: runs of a sweep share it.
            frozen = jax.random.key(0) if kind == "ffa_lora" else None
            model = adapters.lora(model, input_shape, rank=size, frozen_a=frozen, **where)
    return model if options.personal is None else split(model, personal=options.personal)


def frozen_layers(options: Options) -> int:
    """Number of layers of the pretrained model below the lowest adapter, which no training changes."""
    if options.adapter in ("none", "linear_probe"):
        return 0 if options.adapter == "none" else read_config(weights_of(options)).layers
    model = adapted(options, bert(weights_of(options), 1, 2), (1,), jnp.int32)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(shapes)]
    names = [name for path in paths for name in path.split("/")]
    layers = [int(name.removeprefix("layer_")) for name in names if name.startswith("layer_")]
    return 0 if "embeddings" in names or not layers else min(layers)


def with_states(options: Options, dataset: Dataset, console: Console) -> Dataset:
    """Dataset whose inputs are the states below the lowest adapter, computed once and cached; others as they are."""
    if options.model != "bert" or len(dataset.input_shape) != 1:
        return dataset
    layers, path, tokens = frozen_layers(options), weights_of(options), [dataset.train_x, dataset.test_x]
    cache, tokens = cache_folder(), np.concatenate(tokens)
    if not layers or cache is None or tokens.size * 4 * read_config(path).width > MOST_STATES:
        return dataset
    dtype = options.frozen_dtype
    key = hashlib.sha256(tokens.tobytes() + f"{digest(options)}{dtype}".encode()).hexdigest()[:16]
    stored = cache.parent / "states" / f"{key}-{layers}.npy"
    if stored.is_file():
        states = np.load(stored, mmap_mode="r")
    else:
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task(f"States of {layers} frozen layers", total=len(tokens))

            def notify(done: int) -> None:
                bar.update(task, completed=done)

            states = bert_states(path, tokens, layers, frozen_dtype=dtype, notify=notify)
        make_folder(stored.parent)
        write_binary(stored, lambda file: np.save(file, states))
        print_line(console, f"States of {layers} frozen layers: {states.nbytes / 2**20:,.0f} MiB in {stored}")
    number = len(dataset.train_x)
    return dataset._replace(train_x=states[:number], test_x=states[number:])
