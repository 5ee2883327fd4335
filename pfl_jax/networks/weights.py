"""Files of pretrained weights, which are read whole or refused: an array left unread may belong to another network."""

import re
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from pfl_jax.errors import InvalidInput, one_line
from pfl_jax.safe_read import open_npz


def read_weights(path: str | Path) -> Mapping[str, np.ndarray]:
    """Arrays of a .safetensors or .npz file by name; nothing is unpickled.

    Args:
      path: path of the file.

    Raises:
      InvalidInput: the file is missing, of another kind, or damaged.
    """
    path = Path(path)
    if path.suffix not in (".safetensors", ".npz"):
        raise InvalidInput(f"weights are read from .safetensors and .npz files, not from {path}")
    if not path.is_file():
        raise InvalidInput(f"there is no file {path} with weights")
    try:
        if path.suffix == ".npz":
            with open_npz(path) as arrays:
                return dict(arrays)
        from safetensors.numpy import load_file

        return load_file(path)
    except ModuleNotFoundError:
        raise InvalidInput(f'{path} needs safetensors: pip install "safetensors>=0.4,<1"') from None
    except Exception as error:
        raise InvalidInput(f"{path} cannot be read: {type(error).__name__}: {one_line(error, 100)}") from None


class WeightsFile:
    """Arrays of a file, each of which a network has to read.

    Args:
      path: see `read_weights`.
      kind: expected kind of the file, for errors.

    Attributes:
      path: path of the file.
      arrays: name -> array.
      unread: names of the arrays that have not been read.
    """

    def __init__(self, path: str | Path, kind: str):
        self.path: Path = Path(path)
        self.arrays: Mapping[str, np.ndarray] = read_weights(path)
        self.unread: set[str] = set(self.arrays)
        self._kind: str = kind

    def __contains__(self, name: str) -> bool:
        return name in self.arrays

    def read(self, name: str, *shape: int | None) -> np.ndarray:
        """An array as float32.

        Args:
          name: name of the array.
          *shape: its shape; None for an axis of any size.

        Raises:
          InvalidInput: there is no such array, it has another shape, or its numbers are not finite floats.
        """
        if name not in self.arrays:
            raise InvalidInput(f"{self.path} has no {name}: it is not {self._kind}")
        array = self.arrays[name]
        if len(array.shape) != len(shape) or any(
            size not in (None, there) for size, there in zip(shape, array.shape, strict=True)
        ):
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            raise InvalidInput(f"{name} of {self.path} is {list(array.shape)}, and {self._kind} has [{wanted}] there")
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise InvalidInput(f"{name} of {self.path} is {array.dtype}: give the weights as floats, not quantized")
        with np.errstate(over="ignore"):
            array = array.astype(np.float32)
        if not np.isfinite(array).all():
            raise InvalidInput(f"{name} of {self.path} has NaN or infinite numbers")
        self.unread.discard(name)
        return array

    def layers(self, pattern: str) -> int:
        """Number of layers, which are numbered from 0 without a gap.

        Args:
          pattern: regular expression of the beginning of a layer's names; its group is the number.
        """
        numbers = {found[1] for name in self.arrays if (found := re.match(pattern, name))}
        missing = [str(number) for number in range(len(numbers)) if str(number) not in numbers]
        if missing or not numbers:
            what = f"no layer {missing[0]}, and {len(numbers)} others" if missing else "no layers"
            raise InvalidInput(f"{self.path} has {what}: it is not {self._kind}")
        return len(numbers)

    def finish(self, unused: str) -> None:
        """Raise InvalidInput for arrays that have not been read.

        Args:
          unused: regular expression of names that are left alone on purpose.
        """
        if odd := sorted(name for name in self.unread if not re.fullmatch(unused, name)):
            more = f" and {len(odd) - 3} more" if len(odd) > 3 else ""
            raise InvalidInput(
                f"{self.path} has arrays that {self._kind} does not read, so it is another network: "
                f"{', '.join(odd[:3])}{more}"
            )
