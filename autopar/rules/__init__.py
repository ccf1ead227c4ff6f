"""Which ways each primitive can be split over a mesh; importing this registers all."""

from . import (
    attention,
    callbacks,
    conv,
    dot,
    elementwise,
    gather,
    high_product,
    linalg,
    random,
    reduce,
    relayout,
    reshape,
    scatter,
    slicing,
    window,
)

__all__ = [
    "attention",
    "callbacks",
    "conv",
    "dot",
    "elementwise",
    "gather",
    "high_product",
    "linalg",
    "random",
    "reduce",
    "relayout",
    "reshape",
    "scatter",
    "slicing",
    "window",
]
