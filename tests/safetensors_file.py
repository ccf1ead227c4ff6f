"""A reader of safetensors files by their specification, as an oracle of the tests."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np

_DTYPES = {
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "BF16": "bfloat16",
    "C64": "complex64",
}
_KINDS = {"I": "int", "U": "uint", "F": "float"}


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file by name."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    found = {}
    for name, entry in json.loads(content[8:start]).items():
        code = entry["dtype"]
        dtype = jnp.dtype(_DTYPES.get(code) or _KINDS[code[0]] + code[1:])
        first, last = entry["data_offsets"]
        values = np.frombuffer(content[start + first : start + last], dtype)
        found[name] = values.reshape(entry["shape"])
    return found
