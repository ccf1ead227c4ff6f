"""A channel of its own for each collective of a program.

JAX gives all of them one. XLA's devices on CPUs meet by run and channel, and begin a
collective while those of an earlier loop that does not make what it sends are not over:
then some devices wait for one and some for the other, which is a wrong result or none.
With channels of their own they meet only in what is the same.
"""

from __future__ import annotations

import itertools
from typing import Any, TypeVar

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

FIRST_CHANNEL = 1 << 16  # those below are the callbacks'
_CHANNEL = "channel_handle"
_Lowered = TypeVar("_Lowered", bound=Any)


def number_channels(lowered: _Lowered, platform: str) -> _Lowered:
    """What `jax.jit(f).lower` returned; on CPUs, its collectives numbered in order."""
    if platform != "cpu":
        return lowered
    numbers = itertools.count(FIRST_CHANNEL)

    def number(op: Any) -> Any:
        attributes = op.attributes
        if _CHANNEL in attributes:
            kind = stablehlo.ChannelHandle(attributes[_CHANNEL]).channel_type
            handle = stablehlo.ChannelHandle.get(next(numbers), kind)
            attributes[_CHANNEL] = handle
        return ir.WalkResult.ADVANCE

    module = lowered.compiler_ir("stablehlo")
    with module.context:
        module.operation.walk(number)
    return lowered
