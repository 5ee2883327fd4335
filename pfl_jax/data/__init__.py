"""Data: loading (`load`), partition over clients (`partition`) and layout on the device (`federate`)."""

from pfl_jax.data import augment, interchange, partition, partition_files, phases, shift
from pfl_jax.data.arrays import from_arrays, from_clients
from pfl_jax.data.federated import (
    FederatedData,
    class_table,
    client_data,
    federate,
    federate_runs,
    hold_out,
    select_run,
)
from pfl_jax.data.own_files import from_file
from pfl_jax.data.partition import PARTITIONS, Partition
from pfl_jax.data.phases import Phases, federate_phases
from pfl_jax.data.preparation import Preparation
from pfl_jax.data.sources import Dataset, load
from pfl_jax.data.specs import SPECS
from pfl_jax.data.texts import fortunes

__all__ = [
    "PARTITIONS",
    "SPECS",
    "Dataset",
    "FederatedData",
    "Partition",
    "Phases",
    "Preparation",
    "augment",
    "class_table",
    "client_data",
    "federate",
    "federate_phases",
    "federate_runs",
    "fortunes",
    "from_arrays",
    "from_clients",
    "from_file",
    "hold_out",
    "interchange",
    "load",
    "partition",
    "partition_files",
    "phases",
    "select_run",
    "shift",
]
