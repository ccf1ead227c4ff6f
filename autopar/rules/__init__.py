"""Which ways each primitive can be split over a mesh; importing this registers all.

Those of attention are in a folder of their own, which registers them likewise.
"""

from . import (
    callbacks,
    conv,
    dot,
    elementwise,
    gather,
    high_product,
    linalg,
    pallas,
    ragged,
    random,
    reduce,
    reshape,
    scatter,
    slicing,
    window,
)

__all__ = [
    "callbacks",
    "conv",
    "dot",
    "elementwise",
    "gather",
    "high_product",
    "linalg",
    "pallas",
    "ragged",
    "random",
    "reduce",
    "reshape",
    "scatter",
    "slicing",
    "window",
]
