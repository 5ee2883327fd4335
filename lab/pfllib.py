"""Converter of PFLlib's data sets to an .npz file; a program of its own, for PFLlib's environment.

    python lab/pfllib.py PFLlib/dataset/MNIST mnist.npz

PFLlib keeps the rows of client N as pickles in train/N.npz and test/N.npz, and reading a pickle runs the code in it:
convert only data that you trust, where that does no harm. pfl_jax reads no pickles, and nothing of it imports this
file, which needs NumPy alone. Then `python -m experiments.custom --data mnist.npz --client-column client`.
"""

import sys
from pathlib import Path

import numpy as np


def client_rows(file):
    """Inputs, with the channels of images last, and labels of one client."""
    with np.load(file, allow_pickle=True) as stored:
        rows = stored["data"].item()
    x, y = np.asarray(rows["x"]), np.asarray(rows["y"])
    if x.dtype == object or len(x) != len(y):
        raise ValueError(f"{file}: x are no arrays of one shape, or not as many as y; texts cannot be converted")
    x = np.moveaxis(x, 1, -1) if x.ndim == 4 else x
    return x.astype(np.float32) if x.dtype == np.float64 else x, y


def convert(folder, target):
    """Write x, y, client, test_x, test_y and test_client of all clients; return their number."""
    number = len(list((folder / "train").glob("*.npz")))
    arrays = {}
    for split, prefix in (("train", ""), ("test", "test_")):
        rows = [client_rows(folder / split / f"{client}.npz") for client in range(number)]
        arrays[f"{prefix}x"] = np.concatenate([x for x, _ in rows])
        arrays[f"{prefix}y"] = np.concatenate([y for _, y in rows])
        arrays[f"{prefix}client"] = np.repeat(np.arange(number), [len(y) for _, y in rows])
    with open(target, "xb") as file:
        np.savez(file, **arrays)
    return number


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python lab/pfllib.py FOLDER NEW.npz; FOLDER has PFLlib's train/ and test/")
    try:
        done = convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"error: {error}")
    print(f"{done} clients in {sys.argv[2]}")
