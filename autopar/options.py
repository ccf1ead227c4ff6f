"""What `autopar.parallelize` may be told, checked once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from jax.sharding import NamedSharding, PartitionSpec

from .attention.rule import FUSED_KINDS
from .clusters.cluster import Cluster
from .frontend.static_arguments import (
    keyword_names,
    num_positional,
    positions_of,
    resolve_positions,
)
from .frontend.tracing import parameter_names
from .methods.layout_rules import LayoutRules, as_layout_rules
from .methods.methods import (
    Auto,
    Method,
    Microbatched,
    PipelineParallel,
    ShardParallel,
    check_method,
    method_beside,
    num_microbatches_of,
)
from .option_values import (
    OFFLOADS,
    MicrobatchSemantics,
    Offload,
    check_remat,
    default_budget,
    one_of,
    parse_budget,
)
from .plans.plan import ShardingPlan
from .plans.plan_file import read_plan
from .plans.plan_view import Decision
from .plans.staged_plan import StagedPlan
from .sharding.jit_shardings import argument_pins, as_prefix, mesh_of, spec_of
from .sharding.layouts import parse_layout
from .sharding.mesh import MeshLike, parse_mesh
from .sharding.pins import PLACED, BatchLike

Positions = tuple[int, ...] | Literal["auto"]


@dataclass(frozen=True)
class Options:
    """The arguments of `parallelize`; positions are those of the function's own.

    `names` are the function's arguments by position, "" where no keyword can be given.
    """

    method: Method
    mesh: MeshLike | None
    cluster: Cluster | None
    plan: Decision | None
    pins: Mapping[str, PartitionSpec]
    num_microbatches: int
    microbatch_semantics: MicrobatchSemantics
    batch_argnums: tuple[int | str, ...] | Literal["auto"]
    static_argnums: tuple[int, ...]
    donate_argnums: Positions
    names: tuple[str, ...] = ()
    rules: LayoutRules | None = None
    memory_budget: int | None = None  # bytes a device
    like: Decision | None = None
    remat: str | None = None  # "auto", or as `Remat` prints
    offload: Offload | None = None
    static_argnames: tuple[str, ...] = ()  # also those that are keywords alone
    donate_argnames: tuple[str, ...] = ()
    in_shardings: tuple[Any, ...] = ()
    out_shardings: Any = None
    attention: Literal["fused"] | None = None

    def budget_on(self, cluster: Cluster) -> int:
        """What a device may hold, in bytes: as given, or its memory less a reserve."""
        return self.memory_budget or default_budget(cluster)

    def names_at(
        self, positions: Sequence[int], more: Sequence[str] = ()
    ) -> tuple[str, ...]:
        """Keywords for the arguments at `positions`, and `more` of them."""
        own = (n for i, n in enumerate(self.names) if i in positions and n)
        return tuple(dict.fromkeys((*own, *more)))


def resolve_options(fun: Callable[..., Any], options: Options) -> Options:
    """The options with every position counted from the first argument of `fun`.

    Raises:
      ValueError: a position without an argument, or static and donated at once.
    """

    def resolve(name: str, positions: Positions) -> Positions:
        if positions == "auto":
            return "auto"
        return resolve_positions(fun, name, positions)

    batch = options.batch_argnums
    if batch != "auto":
        names = [each for each in batch if isinstance(each, str)]
        numbers = [each for each in batch if isinstance(each, int)]
        batch = (*resolve_positions(fun, "batch_argnums", numbers), *names)
    by_name = options.static_argnames, options.donate_argnames
    static = resolve_positions(fun, "static_argnums", options.static_argnums)
    static += positions_of(fun, "static_argnames", by_name[0])
    donated = resolve("donate_argnums", options.donate_argnums)
    if by_name[1]:
        donated = () if donated == "auto" else donated
        donated += positions_of(fun, "donate_argnames", by_name[1])
    given = () if donated == "auto" else donated
    if both := {*(set(static) & set(given)), *(set(by_name[0]) & set(by_name[1]))}:
        raise ValueError(
            f"A static argument has no buffer to donate, but {both.pop()!r} is in "
            f"`static_argnums` or `static_argnames` and among those to donate; take it "
            f"out of one."
        )
    number = len(static) + len(options.in_shardings)
    names = enumerate(parameter_names(fun, num_positional(fun, number)))
    dynamic = [name for i, name in names if i not in static]
    pins = {**argument_pins(options.in_shardings, dynamic), **options.pins}
    return replace(
        options,
        static_argnums=tuple(sorted({*static})),
        donate_argnums=donated,
        batch_argnums=batch,
        names=keyword_names(fun),
        pins=pins,
    )


def check_options(
    *,
    method: Method | None = None,
    mesh: MeshLike | None = None,
    cluster: Cluster | None = None,
    plan: object = None,
    pins: Mapping[str, Any] | Sequence[tuple[str, Any]] | None = None,
    rules: Any = None,
    memory_budget: int | str | None = None,
    num_microbatches: int | None = None,
    batch_argnums: BatchLike = "auto",
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] | Literal["auto"] = "auto",
    donate_argnames: str | Sequence[str] = (),
    in_shardings: Any = None,
    out_shardings: Any = None,
    remat: str | None = None,
    offload: str | None = None,
    attention: str | None = None,
    like: object = None,
) -> Options:
    """The options as one value; defaults and errors are `autopar.parallelize`'s."""
    model = _plan_to_be_like(like, plan, method, rules)
    given, plan = plan, getattr(plan, "decision", plan)
    if plan is not None and not isinstance(plan, Decision):
        raise TypeError(
            f"`plan` must be an autopar.Plan, but got {given!r} of type "
            f"{type(given).__name__}; load a file with autopar.Plan.load(path)."
        )
    again, at_host = check_remat(remat), one_of("offload", offload, OFFLOADS)
    others = {
        "rules": rules,
        "memory_budget": memory_budget,
        "pins": pins or None,
        "in_shardings": in_shardings,
        "out_shardings": out_shardings,
        "remat": again,
        "offload": at_host,
    }
    for name, value in others.items() if plan is not None else ():
        if value is not None:
            raise ValueError(
                f"A plan is run as it is, so `{name}` must be left out with `plan`, "
                f"but got {value!r}; plan with it: parallelize(f, {name}=...).plan(...)"
            )
    own = list(pins.values()) if isinstance(pins, Mapping) else pins
    mesh = mesh_of(mesh, (own, in_shardings, out_shardings))
    if plan is not None and mesh is not None:
        _check_mesh_of_plan(mesh, plan)
    if cluster is not None and not isinstance(cluster, Cluster):
        raise TypeError(
            f"`cluster` must be an autopar.Cluster, but got {cluster!r}; use "
            f"autopar.Cluster.local(), .preset('8xH100') or .load(path)."
        )
    checked = method_beside(plan, model, check_method(method))
    return Options(
        checked,
        mesh,
        cluster,
        plan,
        pins_by_key(pins or {}),
        num_microbatches_of(num_microbatches, checked),
        checked.microbatch_semantics if isinstance(checked, Microbatched) else "exact",
        "auto"
        if batch_argnums == "auto"
        else _all(batch_argnums, int | str, "batch_argnums", "positions or paths"),
        _all(static_argnums, int, "static_argnums", "positions, from 0 on,"),
        "auto"
        if donate_argnums == "auto"
        else _all(donate_argnums, int, "donate_argnums", "positions, from 0 on,"),
        rules=as_layout_rules(rules),
        memory_budget=None if memory_budget is None else parse_budget(memory_budget),
        like=model,
        remat=again,
        offload=at_host,
        static_argnames=_all(static_argnames, str, "static_argnames", "names"),
        donate_argnames=_all(donate_argnames, str, "donate_argnames", "names"),
        in_shardings=as_prefix(in_shardings),
        out_shardings=out_shardings,
        attention=_attention(attention, plan, checked),
    )


def _all(given: Any, kind: Any, option: str, noun: str) -> tuple[Any, ...]:
    """One or many arguments, by position or name."""
    several = _several(given)
    if not all(isinstance(each, kind) for each in several):
        raise TypeError(f"`{option}` must be {noun} of arguments, but got {given!r}.")
    return several


def _attention(
    given: str | None, plan: Decision | None, method: Method
) -> Literal["fused"] | None:
    """How attention is done; a plan of one program knows."""
    if given not in (None, "fused"):
        raise ValueError(
            f"`attention` must be None, as the step says it, or 'fused', one kernel, "
            f"but got {given!r}; rings are for ShardParallel(attention='ring')."
        )
    if given and getattr(method, "attention", "auto") == "ring":
        raise ValueError(
            f"`attention` is one kernel or a ring, but got {given!r} and {method}; "
            f"leave one of the two out."
        )
    if isinstance(plan, ShardingPlan):
        kinds = {op.kind for op in plan.operators}
        return "fused" if kinds.intersection(FUSED_KINDS) else None
    return "fused" if given else None


def _check_mesh_of_plan(mesh: MeshLike, plan: Decision) -> None:
    """Raises if a plan of one program is to run on another mesh than its own."""
    if isinstance(plan, StagedPlan):
        return
    own = plan.mesh
    try:
        is_same = parse_mesh(mesh, own.size) == own
    except ValueError:
        is_same = False
    if not is_same:
        raise ValueError(
            f"A plan runs on the mesh it was made for, which is {own}, but `mesh` is "
            f"{mesh!r}; leave `mesh` out, or plan for it with parallelize(f, "
            f"like=plan, mesh=...)."
        )


def _plan_to_be_like(
    like: object, plan: object, method: Method | None, rules: Any
) -> Decision | None:
    """The plan that `like` is, or is the path of."""
    if like is None:
        return None
    others = {"plan": plan, "rules": rules}
    given = [name for name, value in others.items() if value is not None]
    allowed = Auto | ShardParallel | PipelineParallel
    if given or not isinstance(check_method(method), allowed):
        raise ValueError(
            f"`like` keeps what a plan chose, so `plan`, `rules` and methods with a "
            f"name of their own must be left out with it, but got "
            f"{' and '.join(given) or method}; pins may be given."
        )
    if isinstance(like, str | os.PathLike):
        like = read_plan(Path(like).read_text(), str(like))
    found = getattr(like, "decision", like)
    if not isinstance(found, Decision):
        raise TypeError(
            f"`like` must be an autopar.Plan or the path of a plan file, but got "
            f"{like!r} of type {type(like).__name__}."
        )
    is_staged = isinstance(found, StagedPlan)
    other = ShardParallel if is_staged else PipelineParallel
    if isinstance(method, other):
        form = "a pipeline" if is_staged else "one program"
        raise ValueError(
            f"`like` keeps the form of a plan, which is {form}, but the method is "
            f"{method}; leave it out."
        )
    return found


def pins_by_key(
    pins: Mapping[str, Any] | Sequence[tuple[str, Any]],
) -> dict[str, Any]:
    """Pins as specs by path or expression; texts such as `[data, -]` are read.

    Raises:
      TypeError: a key is no text, or there are no pairs.
      ValueError: a key is there twice, or a text is no layout.
    """
    pairs = _pairs(pins)
    by_key: dict[str, Any] = {}
    for key, spec in pairs:
        if isinstance(spec, NamedSharding):
            spec = spec_of(spec, "pins")
        if isinstance(spec, str) and spec != PLACED:
            spec = parse_layout(spec)
        by_key[key] = spec
    if len(by_key) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(
            f"A pin must be given once, but got {twice!r} twice; drop one of the two."
        )
    return by_key


def _pairs(pins: object) -> list[tuple[str, Any]]:
    """Keys and specs, whose keys are texts."""
    entries = pins.items() if isinstance(pins, Mapping) else _several(pins)
    for entry in entries:
        is_pair = isinstance(entry, tuple | list) and len(entry) == 2
        if not is_pair or not isinstance(entry[0], str):
            raise TypeError(
                f"`pins` must be specs by path, such as {{'params/w': P('data')}}, or "
                f"pairs of these, but got {entry!r} in it; name an argument by its "
                f"path or by an expression."
            )
    return [(key, spec) for key, spec in entries]


def _several(given: Any) -> tuple[Any, ...]:
    """What is given, one or many; a text is one."""
    is_one = isinstance(given, str) or not isinstance(given, Iterable)
    return (given,) if is_one else tuple(given)
