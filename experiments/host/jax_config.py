"""JAX on this machine: settings before its first computation, devices, and the cache of compiled programs."""

import hashlib
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from experiments.spec.options import Options
from pfl_jax.backends import cpu_cores
from pfl_jax.errors import InvalidInput

MATMUL_PRECISION: dict[str, str] = {"float32": "highest", "tf32": "tensorfloat32", "bf16": "bfloat16"}
"""--precision -> jax_default_matmul_precision."""


def prepare(options: Options) -> None:
    """Make the settings that JAX needs before its first computation; on a CPU one device for each core by default."""
    count = cpu_cores() if options.devices == "auto" else options.devices
    wanted: dict[str, Any] = {
        # One device per core, with clients spread over them, uses the cores better than one device that splits every
        # operation.
        "xla_force_host_platform_device_count": count,
        # XLA ends the process if a device waits longer for another one. The default of 60 seconds is too short for
        # large models on a busy machine.
        "xla_cpu_collective_call_terminate_timeout_seconds": 7 * 24 * 3600,
    }
    if metadata.version("jaxlib").startswith("0.10."):
        # Compiles a third faster without slower rounds. Later versions of XLA end the process for this flag.
        wanted["xla_cpu_use_fusion_emitters"] = "false"
    flags = os.environ.get("XLA_FLAGS", "").split()
    # Flags that the environment sets already stay.
    known = {flag.partition("=")[0] for flag in flags}
    flags += [f"--{name}={value}" for name, value in wanted.items() if f"--{name}" not in known]
    os.environ["XLA_FLAGS"] = " ".join(flags)
    # Omit the places in the code that operations come from, which only the compiler's errors would show.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    jax.config.update("jax_default_matmul_precision", MATMUL_PRECISION[options.precision])
    folder = cache_folder() if options.compilation_cache else None
    if folder is not None:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        # Cache small programs too, so that the next start compiles nothing.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def cache_folder() -> Path | None:
    """Folder of compiled programs, separate for each kind of CPU because machines may share a home folder.

    None for a user without a home folder, as in some containers, and for a path that is not text, which XLA refuses.
    """
    try:
        root = Path(os.environ.get("PFL_JAX_CACHE") or "~/.cache/pfl_jax/xla").expanduser()
        str(root).encode()
    except (RuntimeError, UnicodeEncodeError):
        return None
    try:
        cpu = next(
            line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Features"))
        )
    except (OSError, StopIteration):
        cpu = platform.processor()
    return root / f"{platform.machine()}-{hashlib.sha256(cpu.encode()).hexdigest()[:12]}"


def devices(options: Options) -> list[Any]:
    """Devices that share the clients, the same number from each process; InvalidInput if there are too few."""
    if not options.distributed:
        available = jax.local_devices()
        if options.devices == "auto":
            return available[: options.num_clients]
        if options.devices > len(available):
            raise InvalidInput(f"--devices {options.devices} is more than the {len(available)} available")
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


SHORTAGE = (
    "the memory does not suffice: use a smaller --chunk, fewer --devices, --state-on host or disk, a smaller "
    "--batch-size or --train-size, or fewer --num-clients"
)
"""Advice for a shortage of memory; the first line of a run shows its chunk and devices."""


def is_shortage(error: BaseException) -> bool:
    """Whether the error means that JAX or NumPy could not allocate memory. The system itself kills without an error."""
    text = str(error)
    is_from_jax = isinstance(error, jax.errors.JaxRuntimeError)
    is_memory = "out of memory" in text.lower() or "RESOURCE_EXHAUSTED" in text
    return isinstance(error, MemoryError) or (is_from_jax and is_memory)


def machine_bytes(*, free: bool = False) -> int:
    """Memory of the machine; with `free`, its free memory if the system reports it."""
    pages = "SC_AVPHYS_PAGES" if free and "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def free_bytes(device: Any) -> int:
    """Free memory of a device; for a CPU, or if the device reports none, the machine's."""
    figures = device.memory_stats() or {}
    if "bytes_limit" in figures:
        return figures["bytes_limit"] - figures["bytes_in_use"]
    return machine_bytes(free=True)
