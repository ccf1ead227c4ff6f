"""What becomes of each of JAX's primitives in a plan, read off the rules themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from jax.extend.core import Primitive, primitives

from .. import rules
from ..costs.user_shard_map import COLLECTIVES
from ..graph.build_graph import STRUCTURED
from ..jax_compat import CALLS
from ..rules.base import registered_rules, stay_whole

assert rules  # imported so that every rule registers

Treatment = Literal[
    "split", "once", "structure", "inlined", "whole", "collective", "refused", "unknown"
]
MEANINGS: Mapping[Treatment, str] = {
    "split": "a rule says along which dims it splits",
    "once": "the first device runs it, for all",
    "structure": "planned as what it is: a loop, branch, barrier, pin or shard_map",
    "inlined": "replaced by what it calls",
    "whole": "every device computes it whole",
    "collective": "runs as written in a shard_map of the user's, and is in the plan",
    "refused": "the step is refused, with the reason and a remedy",
    "unknown": "no rule yet: every device computes it whole, with a warning",
}

_WHOLE = {
    "pure_callback": "its result is the same wherever it is called",
    "ffi_call": "a rule by target name may split it: autopar.register_rule",
    "pallas_call": "a rule by kernel name may split it: autopar.register_rule",
    "platform_index": "a scalar",
}
_REFUSED = {
    "after_all": "tokens order side effects, which devices do not share",
    "create_token": "tokens order side effects, which devices do not share",
    "custom_lin": "exists only while jax.linearize runs",
    "get": "reads a mutable Ref",
    "ragged_all_to_all": "its traffic depends on values",
    "swap": "writes a mutable Ref",
}


@dataclass(frozen=True)
class Coverage:
    """What becomes of one primitive, and why, where that is not clear from its rule."""

    primitive: str
    treatment: Treatment
    reason: str = ""

    def __str__(self) -> str:
        reason = f"  {self.reason}" if self.reason else ""
        return f"{self.primitive:<28} {self.treatment:<10}{reason}".rstrip()


def coverage() -> tuple[Coverage, ...]:
    """One entry for each primitive that jax exports or that we know, by name."""
    exported = {p.name for p in vars(primitives).values() if isinstance(p, Primitive)}
    ours = {name for name in registered_rules() if ":" not in name}
    known = (ours, CALLS, STRUCTURED, COLLECTIVES, _WHOLE, _REFUSED)
    return tuple(_covered(name) for name in sorted(exported.union(*known)))


def _covered(name: str) -> Coverage:
    rule = registered_rules().get(name)
    if rule is not None and not rule.may_repeat:
        return Coverage(name, "once")
    if rule is not None:
        return Coverage(name, "whole" if rule.factors is stay_whole else "split")
    if name in STRUCTURED:
        return Coverage(name, "structure")
    if name in CALLS or name == "custom_linear_solve":
        return Coverage(name, "inlined")
    if name in COLLECTIVES or name == "axis_index":
        return Coverage(name, "collective")
    if name in _WHOLE:
        return Coverage(name, "whole", _WHOLE[name])
    if name in _REFUSED:
        return Coverage(name, "refused", _REFUSED[name])
    return Coverage(name, "unknown")


def format_coverage() -> str:
    """The table that `autopar doctor --coverage` prints."""
    entries = coverage()
    lines = [str(entry) for entry in entries]
    for treatment, meaning in MEANINGS.items():
        count = sum(entry.treatment == treatment for entry in entries)
        lines.append(f"{count:4} {treatment}: {meaning}" if count else "")
    return "\n".join(line for line in lines if line)
