"""Identity of a run: the options on which its results depend, and notes on options that have no effect."""

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from experiments.spec.choices import CUSTOM, WITH_FILES
from experiments.spec.hyper_parameters import defaults, parse_schedule, unread_by_method
from experiments.spec.option_notes import Trait, flag, is_partition_file, with_trait
from experiments.spec.options import KINDS, RESULT_NEUTRAL, Options, unread
from experiments.spec.own_code import FILES, by_content
from experiments.spec.spec import Spec, stored_options
from pfl_jax.data import own_files
from pfl_jax.data.natural import NATURAL
from pfl_jax.data.specs import SPECS


def result_neutral(options: Mapping[str, Any]) -> frozenset[str]:
    """Options that do not change the results of a run; --eval-protocol does if it decides when the run ends."""
    ends = any(options.get(name) is not None for name in ("target_accuracy", "patience"))
    return RESULT_NEUTRAL - ({"eval_protocol"} if ends else set())


def relevant_options(spec: Spec) -> dict[str, Any]:
    """Options and hyper-parameters on which the results of a run depend, except seed and data.

    Options without effect on the dataset or the chosen partition are left out, and None is replaced by the value that
    it stands for.
    """
    values = resolve_defaults(spec.values)
    # The attack stays, as None without attackers: a run under attack is a different run.
    unused = unread_options(spec).keys() - {"attack"}
    unused |= result_neutral({name: value for name, value in values.items() if name not in unused}) | {"seed"}
    # `vocabulary` follows from the data, and `procedure` from the options that it sets.
    unused |= {"vocabulary"} - spec.given | {"procedure"}
    if (spec.partition == "natural" and spec.dataset == CUSTOM) or is_partition_file(spec.partition):
        unused.add("num_clients")
    values |= by_content(values, spec.own_code)
    if spec.dataset in WITH_FILES:
        values["data_digest"] = spec.data_digest or own_files.digest(spec.data_path(), spec.test_data)
    else:
        unused |= {*with_trait(KINDS, Trait.OWN_DATA, Trait.FILES)}
    return {name: value for name, value in values.items() if name not in unused}


def resolve_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Values with explicit defaults: `finetune_epochs` None becomes the epochs of training; `attack` is None without
    attackers, and `select_clients` None for a uniform draw."""
    resolved = dict(values)
    if "finetune_epochs" in values and values["finetune_epochs"] is None:
        resolved["finetune_epochs"] = values["epochs"]
    if "attack" in values and not values["attackers"]:
        resolved["attack"] = None
    if values.get("select_clients") == "uniform":
        resolved["select_clients"] = None
    return resolved


def fixed_rounds(options: Options) -> str:
    """Option that makes earlier rounds depend on the number of rounds, so that none can be added; "" without one."""
    if options.full_last_round and options.participation < 1:
        return "--full-last-round"
    if options.phases is not None:
        return "--phases"
    cosine = [text for text in options.schedule or () if parse_schedule(text).kind == "cosine"]
    return f"--schedule {cosine[0]}" if cosine else ""


def unread_options(spec: Spec) -> dict[str, str]:
    """Options of a run, and fields of wrappers, that are not read, given the values of others -> reason, for display.

    `unread_by_method` has further ones, which stay part of a run's identity."""
    whys = unread(spec.values)
    if spec.dataset in NATURAL:
        # Here they limit the rows of a client that are read.
        whys = {name: why for name, why in whys.items() if name not in ("train_size", "test_size")}
    if spec.optimizer != "sgd":
        whys["momentum"] = f"with --optimizer {spec.optimizer}, which has its own"
    if spec.participation == 1:
        # If all clients take part, none is drawn.
        whys |= dict.fromkeys(
            ("straggler_fraction", "straggler_rate", "full_last_round", "select_clients"), "with --participation 1"
        )
    if spec.val_fraction is None and not is_partition_file(spec.partition):
        whys["patience"] = "without --val-fraction"
    if not (spec.dataset in SPECS and SPECS[spec.dataset].fedpac):
        how = "--normalize normalizes" if spec.dataset == CUSTOM else "both papers' settings normalize alike"
        whys["pixel_normalization"] = f"on {spec.dataset}, which {how}"
    return whys


def notes(spec: Spec, given: Iterable[str], backend: str) -> list[str]:
    """Notes about options of a run that are given and have no effect; `backend` is a name of JAX, such as "cpu"."""
    given = set(given)
    whys = unread_by_method(spec.method, spec.hyper_parameters) | unread_options(spec)
    if backend == "cpu" and spec.precision != "float32":
        whys["precision"] = "on a CPU, which computes in float32"
    if spec.dp_clip is None and "client_clip" not in given:
        whys["dp_delta"] = "without --dp-clip or --client-clip"
    if (spec.eval_clients or 0) >= spec.num_clients - spec.held_out_clients:
        whys["eval_clients"] = f"with {spec.num_clients} clients"
    # --attackers 0 does have an effect.
    return [f"{flag(name)} has no effect {why}" for name, why in whys.items() if name in given - {"attackers"}]


def difference(spec: Spec, config: dict[str, Any], *, finished: bool = True) -> str:
    """First difference between a stored and a requested configuration, in words; "" if they agree.

    The protocol before_aggregation is measured only on request. A finished run with it also serves requests without it;
    a run that goes on keeps the protocols that it began with.
    """
    is_real = bool(config["data"]["is_real"])
    source = spec.source
    if source not in ("auto", config["options"].get("source")) and is_real == (source == "embedded"):
        return f"on {config['data']['description']}, not --source {source}"
    if not is_real:
        spec, _ = spec.on_embedded_data()
    if config["dataset"] != spec.dataset:
        return f"on {config['dataset']}, not {spec.dataset}"
    if "procedure" in config:
        return f"made with {config['procedure']} in an order that was drawn anew in each round"
    for name, (found, value) in differences(spec, config).items():
        if name == "data_digest":
            return f"on data with the digest {found}, but {spec.data} has {value}"
        kind = name.removesuffix("_digest")
        if kind in FILES and name not in FILES:
            return f"made with another text of {Path(getattr(spec, kind)).name}"
        return f"{flag(name)} {found}, not {value}"
    if gone := sorted(set(config["hyper_parameters"]) - set(spec.hyper_parameters)):
        return f"{flag(gone[0])} {config['hyper_parameters'][gone[0]]}, which {spec.method} no longer has"
    if gone := sorted(stored_options(config).keys() - KINDS.keys()):
        return f"{flag(gone[0])} {config['options'][gone[0]]}, which is no longer an option"
    optional, requested = "before_aggregation", spec.eval_protocol
    stored_protocol = config["options"].get("eval_protocol", Options.eval_protocol)
    if stored_protocol != requested and (requested == optional or (stored_protocol == optional and not finished)):
        return f"{flag('eval_protocol')} {stored_protocol}, not {requested}"
    return ""


def differences(spec: Spec, config: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Options on which results depend -> their values in a stored and a requested configuration, where they differ."""
    stored = resolve_defaults(config["options"] | config["hyper_parameters"])
    stored |= by_content(stored, config.get("own_code", {}))
    usual = _defaults(spec.method)
    found = {}
    for name, value in (relevant_options(spec) | {"seed": spec.seed}).items():
        # As JSON: tuples come back as lists.
        had = stored.get(name, json.loads(json.dumps(usual.get(name), default=str)))
        if had != json.loads(json.dumps(value)):
            found[name] = had, value
    return found


@functools.cache
def _defaults(method: str) -> dict[str, Any]:
    """Defaults for options that did not exist yet when a run was made."""
    return {field.name: field.default for field in dataclasses.fields(Options)} | defaults(method)
