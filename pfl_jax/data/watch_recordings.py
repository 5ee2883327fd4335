"""Program that converts seglearn's watch_dataset.npy, a pickle, to an .npz file: python watch_recordings.py FILE NPZ.

It runs in a process of its own, needs only NumPy, and its unpickler makes nothing but arrays of NumPy.
"""

import pickle
import sys
from typing import Any

import numpy as np

ALLOWED = {
    (module, name)
    for package in ("numpy", "numpy.core.multiarray", "numpy._core.multiarray", "numpy._core.numeric")
    for module, name in ((package, "ndarray"), (package, "dtype"), (package, "_reconstruct"), (package, "scalar"))
} | {("_codecs", "encode")}
"""What the pickle of a dictionary of arrays names."""


class ArraysOnly(pickle.Unpickler):
    """Unpickler that refuses everything but arrays."""

    def find_class(self, module: str, name: str) -> Any:
        """Class or function of this name in a module, if an array needs it."""
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def convert(source: str, target: str) -> None:
    """Write the recordings of seglearn's file as arrays: lengths [R], values [sum T, 6], subjects [R], labels [R].

    Args:
      source: watch_dataset.npy.
      target: new .npz file.
    """
    with open(source, "rb") as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        read(file)
        content = ArraysOnly(file).load().item()
    recordings = [np.asarray(one, np.float32) for one in content["X"]]
    np.savez(
        target,
        lengths=[len(one) for one in recordings],
        values=np.concatenate(recordings),
        subjects=np.asarray(content["subject"], np.int32),
        labels=np.asarray(content["y"], np.int32),
    )


if __name__ == "__main__":
    try:
        convert(*sys.argv[1:3])
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}")
