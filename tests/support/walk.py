"""Walk of a run from `run(spec)` to its first gradient: which files a reader of the code goes through.

    python tests/support/walk.py digits --method fedavg

Functions of this project count once, in the order in which they are first called. A stay is a sequence of them in one
file; a room is a file; a return is a stay in a file that was left before.
"""

import contextlib
import io
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

PACKAGES = ("experiments", "pfl_jax")


class Walk(NamedTuple):
    """Files of the stays in their order, and the modules of `experiments` with code that were loaded on the way."""

    stays: list[str]
    modules: list[str]

    @property
    def rooms(self) -> list[str]:
        return list(dict.fromkeys(self.stays))

    @property
    def returns(self) -> int:
        return len(self.stays) - len(self.rooms)


def walk(dataset: str, *words: str) -> Walk:
    """Walk of the run that these words ask for, of one round."""
    from experiments.fields import texts_of
    from experiments.spec import Spec

    with tempfile.TemporaryDirectory() as folder:
        own = {"rounds": 1, "out": f"{folder}/run", "compilation_cache": False}
        spec = Spec.of(dataset, **texts_of(words), **own)
        from experiments.run.run import run

        stays, seen, modules = [], set(), []

        def look(frame, event, argument):
            code = frame.f_code
            if event != "call" or modules or code in seen:
                return
            seen.add(code)
            file = Path(code.co_filename)
            if code.co_name == "value_and_grad_f":
                modules.extend(_with_code())
            elif file.is_relative_to(ROOT) and (name := str(file.relative_to(ROOT))).startswith(PACKAGES):
                stays.extend([name] if stays[-1:] != [name] else [])

        with contextlib.redirect_stdout(io.StringIO()):
            sys.setprofile(look)
            try:
                run(spec)
            finally:
                sys.setprofile(None)
    return Walk(stays, modules)


def _with_code() -> list[str]:
    """Loaded modules of the experiments, but for packages that have nothing but a docstring."""
    loaded = {name: Path(one.__file__ or "") for name, one in sys.modules.items() if name.startswith("experiments")}
    return [name for name, file in loaded.items() if file.name != "__init__.py" or file.read_text().count("\n") > 6]


if __name__ == "__main__":
    one = walk(*(sys.argv[1:] or ["digits", "--method", "fedavg"]))
    for number, room in enumerate(one.stays, 1):
        print(f"{number:4} {room}")
    for package in PACKAGES:
        own = [room for room in one.rooms if room.startswith(package)]
        print(f"{package}: {sum(room.startswith(package) for room in one.stays)} stays in {len(own)} rooms")
    print(f"{len(one.stays)} stays, {len(one.rooms)} rooms, {one.returns} returns")
    print(f"{len(one.modules)} modules of experiments: {', '.join(sorted(one.modules))}")
