"""Export of one client's model of a finished run, as safetensors (`pfl_jax.files`) or Flax's MessagePack.

    python -m experiments.export runs/digits-fedper-seed0-001 --client 3 --to model.safetensors

`experiments.commands.export` has its code and explains it.
"""

from experiments.commands.export import LoadedRun, load_run, load_runs, main, plot_curves, read_metrics
from experiments.host.exit_codes import exit_process

__all__ = ["LoadedRun", "load_run", "load_runs", "main", "plot_curves", "read_metrics"]

if __name__ == "__main__":
    exit_process(main())
