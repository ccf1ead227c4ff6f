"""A Wide-ResNet as units: the stem, every residual block, the head; all in 32 bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.published.work import (
    Execution,
    Layout,
    Move,
    Product,
    Stream,
    Unit,
    Units,
)

DEPTHS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
_SIZE = 4  # bytes of a value
# Passes over the result of a convolution: statistics and the norm read it, the norm
# writes it; backward, each reads it and its gradient.
_NORM = 3, 5


class _Conv(NamedTuple):
    """A convolution and its norm; `side` is that of its result."""

    side: int
    before: int
    after: int
    window: int
    stride: int = 1

    @property
    def depth(self) -> float:
        """Multiply-adds for a value; what falls on padding is none."""
        padded = self.window * self.side - max(self.window - self.stride, 0)
        return self.before * (padded / self.side) ** 2


@dataclass(frozen=True)
class WideResnet:
    """Bottleneck blocks whose middle convolution makes `width_factor` times as many."""

    depth: int
    channels: int
    width_factor: int
    image_size: int
    num_classes: int
    seq_len: int = 1
    dtype: str = "float32"
    itemsize: int = _SIZE
    state_bytes: int = 4  # momentum
    units_a_layer: int = 1
    examples_at_once: int = 1
    experts: int = 0

    @property
    def layers(self) -> int:
        return sum(DEPTHS[self.depth])

    @property
    def sequence(self) -> tuple[int, ...]:
        """Each first block of a stage is a unit, the others are one."""
        blocks: list[int] = []
        for stage, number in enumerate(DEPTHS[self.depth]):
            blocks += [1 + 2 * stage, *(2 + 2 * stage,) * (number - 1)]
        return (0, *blocks, 9)

    def units(self, layout: Layout, size: float, how: Execution) -> Units:
        """Each unit once, for `size` images on the devices of a layout together."""
        here, side, width = size / layout.data, self.image_size // 2, self.channels
        stem = _unit("stem", layout, here, [_Conv(side, 3, width, 7, 2)], 0.0)
        found, side = [stem], side // 2
        for stage in range(4):
            channels = self.channels * 2**stage
            wide, after = channels * self.width_factor, 4 * channels
            for stride, before in ((2 if stage else 1, width), (1, after)):
                end, input_bytes = side // stride, here * side**2 * before * _SIZE
                convs = [
                    _Conv(side, before, channels, 1),
                    _Conv(end, channels, wide, 3, stride),
                    _Conv(end, wide, after, 1),
                ]
                convs += [_Conv(end, before, after, 1)] if before != after else []
                found.append(_unit("block", layout, here, convs, input_bytes))
                side = end
            width = after
        params = width * self.num_classes
        head = Unit(
            *("head", (Product(here, self.num_classes / layout.tensor, width),)),
            (Stream(here * side**2 * width * _SIZE, 1, 2),),
            params=params / layout.tensor,
            is_repeated=False,
        )
        return (*found, head)


def _unit(
    name: str, layout: Layout, here: float, convs: Sequence[_Conv], input_bytes: float
) -> Unit:
    """Tensor groups split what goes in of windows of 3, of others what comes out."""
    tensor, products, streams, moves = layout.tensor, [], [], []
    for conv in convs:
        pixels, is_sum = here * conv.side**2, conv.window == 3
        depth, out = conv.depth, float(conv.after)
        depth, out = (depth / tensor, out) if is_sum else (depth, out / tensor)
        result = pixels * conv.after * _SIZE
        products.append(Product(pixels, out, depth))
        streams.append(Stream(result / tensor, *_NORM))
        if tensor > 1:
            kind = "all_reduce" if is_sum else "all_gather"
            moves.append(Move(kind, ("tensor",), result))
    last = convs[-1]
    return Unit(
        *(name, tuple(products), tuple(streams)),
        moves=tuple(moves),
        params=sum(c.before * c.after * c.window**2 for c in convs) / tensor,
        kept_bytes=sum(2 * s.bytes for s in streams) + input_bytes,
        input_bytes=input_bytes,
        border_bytes=here * layout.data * last.side**2 * last.after * _SIZE,
        is_repeated=name == "block",
    )
