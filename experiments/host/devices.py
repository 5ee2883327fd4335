"""Devices that share a run's clients."""

from typing import Any

import jax

from experiments.cli.options import Options
from pfl_jax.errors import InvalidInput


def devices(options: Options) -> list[Any]:
    """Devices that share the clients, the same number from each process.

    Args:
      options: options of the run.

    Raises:
      InvalidInput: there are too few devices, more processes than clients, with --distributed more devices than
        clients, or the devices cannot be shared equally.
    """
    if not options.distributed:
        available = jax.local_devices()
        if options.devices == "auto":
            return available[: options.num_clients]
        if options.devices > len(available):
            raise InvalidInput(f"--devices {options.devices} is more than the {len(available)} there are")
        return available[: options.devices]
    processes = jax.process_count()
    if processes > options.num_clients:
        raise InvalidInput(
            f"{processes} processes cannot share {options.num_clients} clients: start at most {options.num_clients}"
        )
    by_process = [[device for device in jax.devices() if device.process_index == index] for index in range(processes)]
    fewest = min(map(len, by_process))
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
    return [device for available in by_process for device in available[:share]]
