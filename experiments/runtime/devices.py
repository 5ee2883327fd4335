"""Devices that share a run's clients."""

from typing import Any

import jax

from experiments.config.options import Options
from pfl_jax.errors import InvalidInput


def devices(options: Options) -> list[Any]:
    """Devices that share the clients: equally many of every process, if there are several.

    Args:
      options: of the run.

    Raises:
      InvalidInput: more devices are wanted than there are, or processes than clients, or they cannot share equally.
    """
    if not options.distributed:
        there = jax.local_devices()
        if options.devices == "auto":
            return there[: options.num_clients]
        if options.devices > len(there):
            raise InvalidInput(f"--devices {options.devices} is more than the {len(there)} there are")
        return there[: options.devices]
    processes = jax.process_count()
    if processes > options.num_clients:
        raise InvalidInput(
            f"{processes} processes cannot share {options.num_clients} clients: start at most {options.num_clients}"
        )
    of_each = [[one for one in jax.devices() if one.process_index == index] for index in range(processes)]
    fewest = min(map(len, of_each))
    if options.devices == "auto":
        share = min(fewest, options.num_clients // processes)
    else:
        share, rest = divmod(options.devices, processes)
        if rest:
            raise InvalidInput(f"--devices {options.devices} cannot be shared equally by {processes} processes")
        if share > fewest:
            raise InvalidInput(f"--devices {options.devices} is more than {processes} processes have, {fewest} each")
        if options.devices > options.num_clients:
            raise InvalidInput(f"--devices {options.devices} is more than the {options.num_clients} clients")
    return [one for there in of_each for one in there[:share]]
