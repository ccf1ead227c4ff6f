"""What of the forward pass is made again: a level, and for how many segments."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

Level = Literal["selective", "cheap", "full"]
LEVELS: tuple[Level, ...] = get_args(Level)
WORDS = ("none", *LEVELS, "auto")


@dataclass(frozen=True)
class Remat:
    """The residuals that the backward pass makes again, as JAX's remat would.

    By `level`, from the least work to the most:

      selective  what lies between two products of examples with each other: the scores
                 and weights of attention (Megatron-LM's core), from queries and keys
      cheap      all but products: what elementwise operators and reductions make, from
                 the results of products
      full       everything, from what enters a segment

    Segments are the iterations of a loop over layers, or parts of unrolled layers, of
    which `num_segments`, from the first on, do so (None: all but the last, which the
    backward pass starts with). Prints as `full` or `full:3` and parses back.
    """

    level: Level
    num_segments: int | None = None

    def __str__(self) -> str:
        number = self.num_segments
        return self.level if number is None else f"{self.level}:{number}"

    @classmethod
    def parse(cls, text: str) -> Remat:
        """The inverse of `str`.

        Raises:
          ValueError: the text is no level, or has no number of segments behind it.
        """
        found = re.fullmatch(rf"({'|'.join(LEVELS)})(?::([1-9]\d*))?", text)
        if found is None:
            raise ValueError(
                f"`remat` must be one of {', '.join(LEVELS)}, with a number of "
                f"segments behind it if need be (full:3), but got {text!r}."
            )
        level, number = found.groups()
        return cls(
            next(each for each in LEVELS if each == level),
            None if number is None else int(number),
        )


def check_remat(given: object) -> str | None:
    """The option as it is kept: None, "auto", or the text of a `Remat`.

    Raises:
      TypeError: neither None nor a text.
      ValueError: a text that says nothing.
    """
    if given is None or given == "none":
        return None
    if not isinstance(given, str):
        raise TypeError(
            f"`remat` must be None or one of {', '.join(WORDS)}, but got {given!r} of "
            f"type {type(given).__name__}."
        )
    return given if given == "auto" else str(Remat.parse(given))
