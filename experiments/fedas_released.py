"""FedAS as its released code runs it: clients align one shared backbone in place, one after another.

    python -m experiments.fedas_released fashion_mnist --participation 0.2 --out runs/released

In the released code a client aligns the server's own copy of the backbone, and the next client of the cohort receives
what the one before it has left: the last of M clients starts from a backbone with M alignment epochs behind it, each
towards another client. The other choices of the release are on by default (class means, summed over the classes of a
batch; a first alignment with the initial backbone; traces of batch means; incomplete batches dropped, in a fixed
order), and can be given otherwise. All words after the data set are options of
`python -m experiments.DATASET --method fedas`. One device, one client after another, no checkpoints; the folder is that
of any other run.
"""

import sys
from collections.abc import Sequence

from rich.console import Console

from experiments import unknown_dataset
from experiments.cli.exit_codes import exit_code, leave
from experiments.cli.options import flag
from experiments.cli.presets import DEFAULT_PRESET
from experiments.cli.request import IN_PLACE, Request, parse
from experiments.papers.settings import RELEASE
from experiments.run import in_place, run
from pfl_jax.errors import InvalidInput


def released_request(dataset: str, words: Sequence[str]) -> Request:
    """Checked command line: the released code's choices, overridden by the given options.

    Raises:
      InvalidInput: an option that cannot be used here.
    """
    # The choices of the release are options of this method alone.
    usual = ("--preset", "fedas", "--method", "fedas")
    method = parse(dataset, [*usual, *words]).options.method
    if method != "fedas":
        raise InvalidInput(f"experiments.fedas_released runs fedas, not {method}")
    request = parse(dataset, [*usual, *RELEASE.words(method), *words])
    if idle := sorted(request.given & in_place.UNKNOWN_HERE):
        raise InvalidInput(f"{flag(idle[0])} is not an option of {IN_PLACE}")
    return in_place.checked(request)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code, see `exit_codes.exit_code`."""
    words = sys.argv[1:] if words is None else words

    def work() -> None:
        if not words or words[0] in ("-h", "--help"):
            print(__doc__)
            return
        dataset, *rest = words
        if dataset not in DEFAULT_PRESET:
            raise InvalidInput(unknown_dataset(dataset))
        run.run(released_request(dataset, rest), Console())

    return exit_code(work)


if __name__ == "__main__":
    leave(main())
