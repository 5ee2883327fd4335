"""JAX settings that must be made before its first computation."""

import hashlib
import os
import platform
from pathlib import Path

import jax

from experiments.cli.options import MATMUL_PRECISION, Options, Precision


def prepare(options: Options) -> None:
    """Call `prepare_jax` with the values of the options."""
    prepare_jax(
        devices=None if options.devices == "auto" else options.devices,
        precision=options.precision,
        compilation_cache=options.compilation_cache,
    )


def prepare_jax(
    *, devices: int | None = None, precision: Precision = "float32", compilation_cache: bool = True
) -> None:
    """Make the settings that JAX needs before its first computation.

    Args:
      devices: number of simulated devices on a CPU; None for one for each core.
      precision: precision of matrix products and convolutions.
      compilation_cache: whether compiled programs are cached on disk.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = cores if devices is None else devices
    _set_xla_flags(
        {
            # One device per core, with clients spread over them, uses the cores better than one device that splits
            # every operation.
            "xla_force_host_platform_device_count": count,
            # XLA ends the process if a device waits longer for another one. The default of 60 seconds is too short for
            # large models on a busy machine.
            "xla_cpu_collective_call_terminate_timeout_seconds": 7 * 24 * 3600,
        }
    )
    jax.config.update("jax_default_matmul_precision", MATMUL_PRECISION[precision])
    folder = cache_folder() if compilation_cache else None
    if folder is not None:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        # Cache small programs too, so that the next start compiles nothing.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _set_xla_flags(values: dict[str, int]) -> None:
    """Add flags that the environment does not set yet."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    known = {flag.partition("=")[0] for flag in flags}
    flags += [f"--{name}={value}" for name, value in values.items() if f"--{name}" not in known]
    os.environ["XLA_FLAGS"] = " ".join(flags)


def cache_folder() -> Path | None:
    """Folder of compiled programs, separate for each kind of CPU because machines may share a home folder.

    None for a user without a home folder, as in some containers, and for a path that is no text, which XLA refuses.
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
