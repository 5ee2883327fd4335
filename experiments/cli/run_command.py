"""Command of a single run of a table, figure or sweep, which is parsed once for all seeds."""

import dataclasses
import functools
import shlex
from dataclasses import dataclass
from pathlib import Path

from experiments.cli.request import Request, parse
from pfl_jax.errors import InvalidInput

# A table needs each command several times.
_parsed = functools.lru_cache(maxsize=4096)(parse)


@dataclass(frozen=True)
class RunCommand:
    """Command of a single run of a table, figure or sweep: its arguments are those without --seed and --out."""

    dataset: str
    arguments: tuple[str, ...]
    seed: int = 0
    procedure: str = ""

    def request(self, folder: str | Path | None = None) -> Request:
        """Request of the run, checked, with its results in a folder."""
        parsed = _parsed(self.dataset, self.arguments)
        if parsed.options.distributed:
            raise InvalidInput("--distributed is for single runs: a command of many runs has one process")
        out, given = (None, {"seed"}) if folder is None else (str(folder), {"seed", "out"})
        # Many runs would fill the disk.
        keep = parsed.options.keep_state if "keep_state" in parsed.given else "never"
        options = dataclasses.replace(parsed.options, seed=self.seed, out=out, keep_state=keep)
        options.check()
        return dataclasses.replace(parsed, options=options, given=parsed.given | given, procedure=self.procedure)

    def command(self, folder: str | Path | None = None) -> str:
        """Shell command of the same run."""
        released = ("experiments.lab.fedas_ablation.released", self.dataset)
        module = released if self.procedure else (f"experiments.{self.dataset}",)
        out = () if folder is None else ("--out", str(folder))
        return shlex.join(["python", "-m", *module, *self.arguments, "--seed", str(self.seed), *out])
