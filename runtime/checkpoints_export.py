"""Weights as one file that other programs read, written leaf by leaf.

The file is in the format of safetensors (huggingface/safetensors, "Format"): the length
of a header, the header as JSON, then the bytes of every array. It keeps bfloat16 and
float8, which `.npz` does not, holds no code, and is mapped into memory by its readers.
It is written here because the library's own writer wants all arrays at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np
from jax.experimental import multihost_utils

from autopar.state.distributed_array import DistributedArray

from .checkpoint import data_type, stored_leaves

_CODES = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}
_ALIGNMENT = 8


def export_weights(path: str | os.PathLike[str], weights: Any) -> None:
    """Write arrays, wherever their parts lie, as one safetensors file.

    Every byte is that of the array. A process holds one whole leaf at a time. Names are
    those of `autopar.save`, joined by dots: "layers.0.kernel". A file that exists is
    replaced when the new one is complete. Under `jax.distributed` all processes make
    the call, and the first one writes.

    Args:
      path: the file; by custom it ends in ".safetensors".
      weights: a tree of arrays. Where a model computes in bfloat16 and its optimizer
        keeps float32 weights, give those of the optimizer.

    Raises:
      TypeError: a leaf that is a shape only, or has a dtype that the format has not.
      ValueError: there are no arrays, or two leaves have one name.
      RuntimeError: an array was donated or deleted.
    """
    leaves = {".".join(n): leaf for n, leaf in stored_leaves(weights).items()}
    # Wide items first, so that all of them are aligned.
    names = sorted(leaves, key=lambda n: (-data_type(leaves[n])[1].itemsize, n))
    header = _header({name: leaves[name] for name in names})
    if jax.process_index() > 0:
        for name in names:
            _whole(leaves[name])  # all processes take part in gathering it
        return
    target = Path(path)
    unfinished = target.with_name(f"{target.name}.unfinished")
    with ExitStack() as undo:
        undo.callback(unfinished.unlink, missing_ok=True)
        with unfinished.open("wb") as file:
            _write(file, header)
            for name in names:
                values = np.ascontiguousarray(_whole(leaves[name])).reshape(-1)
                file.write(values.view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, target)
        undo.pop_all()


def _header(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """What the file says of each array: dtype, shape, first and last byte."""
    header, first = {}, 0
    for name, leaf in leaves.items():
        shape, dtype = data_type(leaf)
        is_key = jax.dtypes.issubdtype(
            getattr(leaf, "dtype", dtype), jax.dtypes.prng_key
        )
        if is_key or dtype.name not in _CODES:
            raise TypeError(
                f"A safetensors file holds arrays of {', '.join(_CODES)}, but {name} "
                f"is {getattr(leaf, 'dtype', dtype)}; export the weights only, or "
                f"convert it first."
            )
        last = first + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        header[name] = {
            "dtype": _CODES[dtype.name],
            "shape": list(shape),
            "data_offsets": [first, last],
        }
        first = last
    return header


def _write(file: BinaryIO, header: Mapping[str, Any]) -> None:
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    file.write(len(text).to_bytes(8, "little") + text)


def _whole(leaf: Any) -> np.ndarray:
    """All of a leaf in this process."""
    if isinstance(leaf, DistributedArray):
        chunks = [_whole(chunk) for chunk in leaf.chunks]
        return chunks[0] if len(chunks) == 1 else np.concatenate(chunks)
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf)
    if not leaf.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
    whole = np.empty(leaf.shape, leaf.dtype)
    for shard in leaf.addressable_shards:
        if shard.replica_id == 0:
            # An array keeps what numpy got of it: a copy keeps it not beyond this line.
            copy = jax.device_put(shard.data, shard.device, may_alias=False)
            whole[shard.index] = np.asarray(copy)
    return whole
