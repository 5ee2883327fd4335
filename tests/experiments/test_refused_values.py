"""Every option refuses each kind of value that its annotation excludes, and says which values it takes."""

import math
import types
from typing import get_args, get_origin

import pytest

from experiments.cli.parser import OptionGroup, options_of, split
from experiments.fields import flag
from experiments.hyper_parameters import method_options
from experiments.options import Options
from pfl_jax import InvalidInput
from pfl_jax.methods import METHODS
from pfl_jax.validation import Range, Words, describe, literals, notes_of, parts, range_of

OPTIONS = {f"--{name}": option for name, option in options_of(Options).items()}
for method in METHODS:
    for name, option in method_options(method).items():
        if not any((name, option.kind) == (other.name, other.kind) for other in OPTIONS.values()):
            OPTIONS[f"{method} --{name}"] = option

RANGES = {
    "be at least 1": "rounds num_clients eval_every eval_clients checkpoint_every keep_checkpoints chunk devices "
    "test_size min_size batch_size epochs clusters buffer num_processes",
    "be at least 2": "vocabulary",
    "be positive": "beta temperature sigma attack_scale clip_norm dp_clip client_clip",
    "not be negative": "lr lam dp_noise client_noise",
    "be between 0 and 1": "straggler_fraction alpha epsilon",
    "be between 0 and 100": "s",
    "be above 0 and at most 1": "participation straggler_rate mean_rate",
    "be at least 0 and below 1": "momentum drop_rate attackers",
    "be above 0 and below 1": "val_fraction dp_delta test_fraction",
    "be finite": "target_accuracy",
}
"""What a number must do -> options."""
TYPES = {
    "a whole number": "rounds clusters",
    "a number": "participation lr",
    "a whole number or auto": "chunk devices",
    "a whole number or None": "train_size",
    "a number or None": "val_fraction",
    "one or more of a whole number or None": "hidden size_choices",
    "float32, tf32 or bf16": "precision",
    "labels, signs, noise or None": "attack",
    "sgd, adam, yogi, adagrad or None": "server_optimizer",
}
"""What a value must be -> options."""
NUMBERED = {
    "trimmed": "be at least 0 and below 0.5",
    "krum": "be at least 0 and below 0.5",
    "topk": "be above 0 and at most 1",
    "quantize": "be between 2 and 32",
    "lora": "be at least 1",
}
"""Word of an option -> what the number after it must do."""


def words_of(kind):
    return next((note for note in notes_of(kind) if isinstance(note, Words)), None)


def wrong_numbers(kind):
    """Texts that are no number in the range of a type, and the end of the message."""
    limits, members = range_of(kind), parts(kind)
    if math.isfinite(limits.low):
        low = limits.low - (not limits.above)
        yield f"{low:g}", f"must {limits}, not {low:g}"
    if math.isfinite(limits.high):
        high = limits.high + (not limits.below)
        yield f"{high:g}", f"must {limits}, not {high:g}"
    for text in ("inf", "nan") if float in members else ():
        yield text, f"must {limits if math.isfinite(limits.high) else Range()}, not {text}"
    for text in ("half", "") if float in members else ("half", "1.5", ""):
        yield text, f"must be {describe(kind)}, not '{text}'"


def wrong_values(option):
    """Texts that an option refuses, and the message."""
    name, kind, members, words = flag(option.name), option.kind, parts(option.kind), words_of(option.kind)
    if several := [get_args(part)[0] for part in members if get_origin(part) is tuple]:
        if int in several:
            yield "3 64,32", f"{name} must be {describe(kind)}, not '64,32'"
    elif words is not None:
        yield "???", f"{name} must be {words}, not '???'"
        for word, number in words.numbered.items():
            yield from ((f"{word}:{text}", f"{name} {word}:NUMBER {end}") for text, end in wrong_numbers(number))
    elif {int, float} & {*members}:
        yield from ((text, f"{name} {end}") for text, end in wrong_numbers(kind) if text)
    elif literals(kind) and types.NoneType in members:
        yield "???", f"{name} must be {describe(kind)}, not '???'"
    elif literals(kind):
        yield "???", f"unknown {name[2:]} '???' (there are {', '.join(literals(kind))})"


def refusal(option, *words):
    with pytest.raises(InvalidInput) as error:
        split(words, [OptionGroup("", "", {option.name: option})])
    return str(error.value)


@pytest.mark.parametrize("key", OPTIONS)
def test_what_an_annotation_excludes_is_refused(key):
    option = OPTIONS[key]
    name = flag(option.name)
    for text, message in wrong_values(option):
        # Some go on with what to do.
        assert refusal(option, name, *text.split(" ")).partition(";")[0] == message
    if parts(option.kind) == (bool,):
        assert refusal(option, f"{name}=yes") == f"{name} takes no value: give {name} or {flag('no_' + option.name)}"
    else:
        assert refusal(option, name) == refusal(option, name, name) == f"{name} needs a value: {describe(option.kind)}"


def said(names, say):
    """What is said of the options of these names, each of which must be there."""
    found = {name: {say(option.kind) for option in OPTIONS.values() if option.name == name} for name in names.split()}
    return found.values()


def test_ranges_and_types_in_words():
    assert all(text in each for text, names in RANGES.items() for each in said(names, lambda kind: str(range_of(kind))))
    assert all(text in each for text, names in TYPES.items() for each in said(names, describe))
    numbered = [words_of(option.kind).numbered for option in OPTIONS.values() if words_of(option.kind)]
    found = {word: str(range_of(kind)) for each in numbered for word, kind in each.items()}
    assert {word: found[word] for word in NUMBERED} == NUMBERED
