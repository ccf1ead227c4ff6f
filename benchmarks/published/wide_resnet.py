"""A Wide-ResNet as units: the stem, every residual block, the head; all in 32 bits."""

from __future__ import annotations

from dataclasses import dataclass

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
        here, side = size / layout.data, self.image_size // 2
        stem = _unit("stem", layout, here, [(side, 3, self.channels, 7, 1)], 0.0)
        found, side, width = [stem], side // 2, self.channels
        for stage in range(4):
            channels = self.channels * 2**stage
            for stride, before in ((2 if stage else 1, width), (1, 4 * channels)):
                convs, side, width = self._convs(side, before, channels, stride)
                input_bytes = here * (side * stride) ** 2 * before * _SIZE
                found.append(_unit("block", layout, here, convs, input_bytes))
        product = Product(here, self.num_classes / layout.tensor, width)
        params = width * self.num_classes
        head = Unit(
            *("head", (product,), (Stream(here * side**2 * width * _SIZE, 1, 2),)),
            params=params / layout.tensor,
            whole_params=params,
            is_repeated=False,
        )
        return (*found, head)

    def _convs(
        self, side: int, before: int, channels: int, stride: int
    ) -> tuple[list[tuple[int, ...]], int, int]:
        """(side of the result, channels in and out, window, whether it is split by
        what goes in) of each; then the side and the channels behind them."""
        wide, after, end = channels * self.width_factor, 4 * channels, side // stride
        convs = [
            (side, before, channels, 1, 0),
            (end, channels, wide, 3, 1),
            (end, wide, after, 1, 0),
        ]
        if before != after:
            convs.append((end, before, after, 1, 0))
        return convs, end, after


def _unit(
    name: str,
    layout: Layout,
    here: float,
    convs: list[tuple[int, ...]],
    input_bytes: float,
) -> Unit:
    """Convolutions as products: each tensor group splits channels, out and then in."""
    tensor, products, streams, moves = layout.tensor, [], [], []
    for side, before, after, window, splits_input in convs:
        pixels = here * side**2
        depth, out = before * window**2, float(after)
        if splits_input or tensor == 1:
            depth /= tensor
        else:
            out /= tensor
        products.append(Product(pixels, out, depth))
        result = pixels * after * _SIZE
        streams.append(Stream(result / tensor, *_NORM))
        if tensor > 1:
            kind = "all_reduce" if splits_input else "all_gather"
            moves.append(Move(kind, ("tensor",), result))
    whole = sum(before * after * window**2 for _, before, after, window, _ in convs)
    kept = sum(2 * s.bytes for s in streams)
    side, _, after, _, _ = convs[-1]
    return Unit(
        *(name, tuple(products), tuple(streams)),
        moves=tuple(moves),
        params=whole / tensor,
        whole_params=whole,
        kept_bytes=kept + input_bytes,
        input_bytes=input_bytes,
        border_bytes=here * layout.data * side**2 * after * _SIZE,
        is_repeated=name == "block",
    )
