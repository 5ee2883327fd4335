"""Methods, models and losses in the user's own files: `--method FILE.py:NAME`, `--model`, `--loss`.

A file is executed once in a process, like a script; its imports search installed packages first, then its folder. The
digest of its text is part of a run's configuration: with another text, a run cannot be continued, and its results do
not count. The digest does not cover files that the file imports.
"""

import functools
import hashlib
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_origin

from experiments.spec.option_notes import Trait, flag, is_own, is_partition_file, with_trait
from experiments.spec.options import KINDS, RESULT_NEUTRAL
from pfl_jax.base import Method
from pfl_jax.errors import InvalidInput, first_line, last_frame
from pfl_jax.methods import METHODS
from pfl_jax.methods.factories import arguments, default_training
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.validation import hint, parts

EXECUTED = with_trait(KINDS, Trait.CODE)
"""Options that take FILE.py:NAME."""
CODE = tuple(name for name in EXECUTED if name not in RESULT_NEUTRAL)
"""Options of EXECUTED on which results depend."""
OTHER_FILES = with_trait(KINDS, Trait.FILE)
"""Options that name a file without code."""
FILES = (*CODE, "partition", *OTHER_FILES)
"""Options that may name a file whose content is part of a run's identity."""


def files(values: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Files that options name, for a run's configuration: option -> its path and the digest of its text."""
    found = {}
    if (tracker := values["tracker"]) is not None:
        function("tracker", tracker)
    for kind in CODE:
        name = values[kind]
        if kind == "loss" and name is not None and not is_own(name):
            raise InvalidInput(f"--loss {name} is not FILE.py:NAME of a function (outputs, y, mask) -> scalar")
        if is_own(name):
            function(kind, name)
            path = path_of(name)
            found[kind] = {"file": str(path), "digest": _load(path)[1]}
    others = {kind: weights_file(values[kind]) for kind in OTHER_FILES if values[kind] is not None}
    if is_partition_file(values["partition"]):
        others["partition"] = Path(values["partition"])
    return found | {kind: {"file": str(path), "digest": _digest(read(path))} for kind, path in others.items()}


def weights_file(name: str) -> Path:
    """File of --weights, which may be its folder."""
    path = Path(name).expanduser().resolve()
    return path / "model.safetensors" if path.is_dir() else path


def check_unchanged(kind: str, entry: Mapping[str, str]) -> None:
    """Raise InvalidInput unless an entry of `files` still has the text that a run began with; nothing is executed."""
    path = Path(entry["file"])
    if _digest(read(path)) != entry["digest"]:
        option = kind.replace("_", "-")
        raise InvalidInput(
            f"the run began with another text of {path}, its --{option}: restore that text, or start the run anew"
        )


def by_content(values: dict[str, Any], own_code: dict[str, dict[str, str]]) -> dict[str, str]:
    """Names without folders, and digests, of the user's own files in a run, for comparisons of runs."""
    return {kind: Path(values[kind]).name for kind in own_code} | {
        f"{kind}_digest": entry["digest"] for kind, entry in own_code.items()
    }


def function(kind: str, name: str) -> Callable[..., Any]:
    """Function of an option (of EXECUTED) with the value FILE.py:NAME."""
    _, colon, attribute = name.rpartition(":")
    if not colon or not attribute:
        raise InvalidInput(f"{flag(kind)} {name} lacks the name of a function in the file: {name.rstrip(':')}:NAME")
    module, _ = _load(path_of(name))
    found = getattr(module, attribute, None)
    if found is None:
        raise InvalidInput(f"{flag(kind)} {name}: the file has no {attribute}{hint(attribute, vars(module))}")
    if not callable(found):
        raise InvalidInput(f"{flag(kind)} {name} is a {type(found).__name__}, not a function")
    return found


def method_factory(name: str) -> Callable[..., Method]:
    """Factory of a method, a key of METHODS or FILE.py:NAME, whose signature is checked."""
    if not is_own(name):
        return METHODS[name]
    factory = function("method", name)
    try:
        own = arguments(factory)
        default_training(factory)
    except InvalidInput as error:
        raise InvalidInput(f"--method {name}: {error}") from None
    except Exception as error:
        raise InvalidInput(f"--method {name}: its annotations cannot be read ({error})") from None
    for one in own.values():
        if one.default is inspect.Parameter.empty:
            raise InvalidInput(f"--method {name}: its option {one.name} needs a default")
        if one.name in LocalTraining.__dataclass_fields__:
            raise InvalidInput(f"--method {name}: {one.name} is a field of the recipe of local training, not its own")
        option_kind(name, one)
    return factory


def option_kind(name: str, parameter: inspect.Parameter) -> Any:
    """Type of the option for a keyword-only argument of a method: its annotation, otherwise its default's type."""
    kind = parameter.annotation
    if kind is inspect.Parameter.empty:
        kind = type(parameter.default)
    known = (int, float, str, types.NoneType, tuple[int, ...], tuple[float, ...], tuple[str, ...])
    if parts(kind) != (bool,) and not all(get_origin(part) is Literal or part in known for part in parts(kind)):
        raise InvalidInput(
            f"--method {name}: its option {parameter.name} is a {getattr(kind, '__name__', kind)}; options are bool, "
            "int, float, str, Literal[...], tuple[int, ...], or a union of these with None"
        )
    return kind


def describe_foreign_error(error: BaseException) -> str:
    """Kind and first line of an error that the user's own code raised."""
    kind = "" if isinstance(error, InvalidInput) else type(error).__name__
    return ": ".join(filter(None, [kind, first_line(error)]))


def path_of(name: str) -> Path:
    """File of a value FILE.py:NAME."""
    return Path(name.rpartition(":")[0]).expanduser().resolve()


def read(path: Path) -> bytes:
    """Content of a file; InvalidInput if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror or error}") from None


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:12]


# Cached, so that a run's digest belongs to the text that was executed.
@functools.cache
def _load(path: Path) -> tuple[types.ModuleType, str]:
    """Executed file and the digest of its text."""
    text = read(path)
    digest = _digest(text)
    module = types.ModuleType(f"{path.stem}_{digest}")
    module.__file__ = str(path)
    # Dataclasses, such as flax modules, look up their module in sys.modules.
    sys.modules[module.__name__] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        exec(compile(text, str(path), "exec"), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        frame = last_frame(error, {str(path)})
        line = error.lineno if isinstance(error, SyntaxError) else frame and frame.lineno
        where = f"line {line}: " if line else ""
        raise InvalidInput(f"{path} cannot be executed: {where}{describe_foreign_error(error)}") from None
    return module, digest
