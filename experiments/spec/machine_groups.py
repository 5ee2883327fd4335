"""The options of all experiments about files and hardware, in groups; those about the results are in `groups`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from experiments.spec.choices import FromZero
from experiments.spec.option_notes import Also, Needs, NotInSweeps, Trait
from pfl_jax.backends import BACKENDS, Precision
from pfl_jax.validation import Count

NEUTRAL, HERE = Trait.NEUTRAL, Trait.NOT_IN_FILES


@dataclass(frozen=True, kw_only=True)
class Output:
    """Output files, and resumption of an interrupted run."""

    out: Annotated[
        str | None,
        NEUTRAL,
        HERE,
        Also("save_folder_name"),
        NotInSweeps("every run has its folder in the sweep's --out"),
    ] = None
    """New folder for the results; None creates one under runs/."""
    keep_state: Annotated[Literal["auto", "always", "never"], NEUTRAL] = "auto"
    """Write a checkpoint of the final state of server and clients, for experiments.export, load_run and more rounds;
    auto writes up to 256 MiB, and nothing in commands with many runs."""
    checkpoint_every: Annotated[Count | None, NEUTRAL] = None
    """Rounds between two checkpoints, one after the last; None writes one at an interruption or for --keep-state."""
    keep_checkpoints: Annotated[Count, NEUTRAL] = 2
    """Number of checkpoints to keep, the newest ones."""
    resume: Annotated[str | None, NEUTRAL, HERE, NotInSweeps("the same command goes on where it was stopped")] = None
    """Folder of an interrupted run to continue from its newest checkpoint; no other option is needed, but --method,
    --model and --loss where they are your own files. With a larger --rounds, rounds are added to a run, also to a
    finished one."""
    config: Annotated[str | None, NEUTRAL, HERE] = None
    """File with options, .toml or .json, or the config.json of a run, which is then repeated; what is given beside it
    counts."""
    print_config: Annotated[bool, NEUTRAL, HERE, NotInSweeps("it is for single runs")] = False
    """Print all options on which results depend as JSON for --config, and run nothing."""
    plot: Annotated[bool, NEUTRAL] = False
    """Plot the primary score over the rounds at the end, as curves.png in the run's folder."""
    tensorboard: Annotated[bool, NEUTRAL] = False
    """Also write the evaluations for TensorBoard, into tensorboard/ in the run's folder."""
    wandb: Annotated[
        bool, NEUTRAL, HERE, NotInSweeps("its runs go side by side in one process, where W&B has one run at a time")
    ] = False
    """Also send the evaluations to Weights & Biases, which its own environment variables configure; needs pip install
    wandb."""
    tracker: Annotated[str | None, NEUTRAL, HERE, Trait.CODE] = None
    """FILE.py:NAME of your own function, which is called with the run's configuration and returns a function
    (round, scores) that gets each evaluation: names such as received/mean -> numbers. It is executed only where a
    command line names it."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Hardware and precision; up to rounding, results do not depend on these options."""

    devices: Annotated[Count | Literal["auto"], NEUTRAL, Also("gpu", "device", "mesh")] = "auto"
    """Number of devices that share the clients, in all processes together; auto is all devices, on a CPU one for each
    core."""
    chunk: Annotated[Count | Literal["auto"], NEUTRAL] = "auto"
    """Clients trained together under one vmap on a device; 1 trains one after another. auto is 1 for convolutional
    networks on CPUs, otherwise the largest number for which clients of different sizes waste less than a tenth of the
    gradient steps."""
    state_on: Annotated[
        Literal["auto", "device", "host", "disk"],
        NEUTRAL,
        NotInSweeps("its runs keep their clients' states on the devices"),
    ] = "auto"
    """Place of the clients' states between rounds: the memory of the device or the host, or a file in the run's folder.
    auto is host if the states of all clients would take more than a quarter of the device's free memory, disk if they
    would take more than half of the machine's memory, otherwise device. The results are the same."""
    precision: Precision = BACKENDS["default"].precision
    """Precision of matrix products and convolutions on a GPU; a CPU always uses float32."""
    compilation_cache: Annotated[bool, NEUTRAL] = True
    """Cache compiled programs in ~/.cache/pfl_jax/xla (or $PFL_JAX_CACHE), so that the next run starts faster."""
    distributed: Annotated[
        bool, NEUTRAL, HERE, Trait.PROCESSES, NotInSweeps("a command of many runs has one process")
    ] = False
    """Share the run among several processes, on one or more machines: start the same command in each process. Under
    Slurm and other schedulers the processes find each other. The first process reports and writes files."""
    coordinator: Annotated[str | None, NEUTRAL, HERE, Trait.PROCESSES, Needs("distributed"), Needs("num_processes")] = (
        None
    )
    """HOST:PORT of the first process, if there is no scheduler; needs --distributed, --num-processes and
    --process-id."""
    num_processes: Annotated[Count | None, NEUTRAL, HERE, Trait.PROCESSES, Needs("process_id")] = None
    """Number of processes (only with --distributed)."""
    process_id: Annotated[FromZero | None, NEUTRAL, HERE, Trait.PROCESSES, Needs("coordinator")] = None
    """Number of this process, from 0 (only with --distributed)."""
