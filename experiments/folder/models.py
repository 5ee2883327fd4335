"""Files of model parameters that other programs can read.

safetensors (https://huggingface.co/docs/safetensors) is eight bytes with the length of a header, the header as JSON,
and the arrays one after another, little-endian.
"""

import json
import struct
from pathlib import Path

import jax
import numpy as np
from flax import serialization

from pfl_jax.atomic_write import write_binary
from pfl_jax.base import Params

ENDINGS = (".safetensors", ".msgpack")

_KINDS = {"float32": "F32", "float64": "F64", "float16": "F16", "int32": "I32", "int64": "I64", "uint8": "U8"}


def save(path: Path, params: Params, about: dict[str, str]) -> int:
    """Write parameters to a new file; return how many there are.

    In safetensors a parameter's name is its path, "backbone.conv1.kernel", beside metadata `about`; .msgpack is read by
    `flax.serialization.msgpack_restore`.
    """
    arrays = jax.tree.map(np.asarray, params)
    if path.suffix == ".msgpack":
        content = serialization.msgpack_serialize(serialization.to_state_dict(arrays))
    else:
        content = _safetensors(arrays, about)
    write_binary(path, lambda file: file.write(content))
    return sum(leaf.size for leaf in jax.tree.leaves(arrays))


def _safetensors(params: Params, about: dict[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": about}
    parts, end = [], 0
    for place, leaf in jax.tree_util.tree_leaves_with_path(params):
        data = leaf.astype(leaf.dtype.newbyteorder("<")).tobytes()
        header[jax.tree_util.keystr(place, simple=True, separator=".")] = {
            "dtype": _KINDS[str(leaf.dtype)],
            "shape": list(leaf.shape),
            "data_offsets": [end, end + len(data)],
        }
        parts.append(data)
        end += len(data)
    text = json.dumps(header).encode()
    # Arrays begin at a multiple of eight bytes.
    text += b" " * (-len(text) % 8)
    return b"".join([struct.pack("<Q", len(text)), text, *parts])
