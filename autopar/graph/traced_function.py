"""What a graph is built of: a traced function, and what its arguments are."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from ..jax_compat import PyTreeDef
from .op_graph import Role


@dataclass(frozen=True, eq=False)
class TracedFunction:
    """One function at one signature.

    `jaxpr` takes the leaves of `(args, kwargs)` in tree order, static arguments left
    out, and returns the leaves of the result.
    """

    name: str
    jaxpr: Any  # jax.extend.core.ClosedJaxpr
    in_tree: PyTreeDef
    out_tree: PyTreeDef
    input_paths: tuple[str, ...]
    output_paths: tuple[str, ...]


@dataclass(frozen=True)
class Roles:
    """The role of each input leaf; `next_output[i]` is where state leaf i returns."""

    roles: tuple[Role, ...]
    next_output: tuple[int | None, ...]
    notes: tuple[str, ...]  # what a user should know: state that could not be tied

    def with_batch(self, batch: Collection[int], notes: Sequence[str] = ()) -> Roles:
        """The same state, and `batch` as the leaves of the batch."""
        roles = tuple[Role, ...](
            role if role == "state" else "batch" if leaf in batch else "other"
            for leaf, role in enumerate(self.roles)
        )
        return Roles(roles, self.next_output, (*self.notes, *notes))

    def summary(self, arguments: Sequence[str]) -> str:
        """One line: `state: params, opt_state; batch: x, y`."""
        names: dict[Role, list[str]] = {}
        for role, path in zip(self.roles, arguments, strict=True):
            root = root_of(path)
            if root not in names.setdefault(role, []):
                names[role].append(root)
        return "; ".join(f"{role}: {', '.join(found)}" for role, found in names.items())


def root_of(path: str) -> str:
    """The argument that a leaf belongs to."""
    return path.split("[")[0].split(".")[0]
