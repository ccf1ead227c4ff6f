"""Rules for primitives of one's own, written like an einsum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from ..graph.op_graph import Operator
from ..sharding.spec import MAX, MIN, REPLICATED, SUM, State
from .base import (
    KERNEL_NAMES,
    Factor,
    Rule,
    Shard,
    bind_params,
    replace_rule,
    rule_name,
)

Reduction = Literal["sum", "max", "min"]
LocalFunction = Callable[..., Any]

_REDUCTIONS: dict[str, State] = {"sum": SUM, "max": MAX, "min": MIN}


def register_rule(
    primitive: Any,
    equation: str,
    *,
    local: LocalFunction | None = None,
    blocked: str = "",
    reduction: Reduction = "sum",
) -> None:
    """Tell the planner how a primitive of one's own may be split.

    `equation` names the dims of every operand and result, as in einsum, with a space
    between names: `"b m k, b k n -> b m n"` is a batched matrix product. A name that
    occurs on both sides may be split without communication; one that occurs only among
    the operands may be split too, and the result is then reduced; a name that occurs
    only in a result, and `_`, stay whole.

    Args:
      primitive: a `jax.extend.core.Primitive`, or the name of one. One primitive runs
        every Pallas kernel, and one every FFI call: those go by `"pallas_call:name"`
        and `"ffi_call:target_name"`, and need `local`.
      equation: the dims of operands and results; an operand without dims is empty, as
        in `"b d, , d -> b d"`.
      local: what to run on the shards in place of the primitive itself, for one whose
        params hold shapes. It is called with the local operands, and with the
        primitive's params by keyword unless it is a kernel's; it returns one result or
        a tuple. For a kernel this is the function that calls it.
      blocked: names, separated by spaces, that must stay whole.
      reduction: how results are combined over a split name that they do not have.

    Raises:
      ValueError: the equation cannot be read, or blocks a name it does not have; a
        kernel has no name or no `local`. When a step is planned: the equation does not
        fit the operands; when it is lowered: results have other shapes than shards.
    """
    name = primitive if isinstance(primitive, str) else primitive.name
    is_kernel = _check_kernel(name, local)
    operands, results = _parse(equation)
    names = {dim for dims in operands for dim in dims if dim != "_"}
    unknown = set(blocked.split()) - names
    if unknown:
        raise ValueError(
            f"`blocked` may only hold names of the operands in {equation!r}, but got "
            f"{' '.join(sorted(unknown))!r}."
        )
    if reduction not in _REDUCTIONS:
        raise ValueError(
            f"`reduction` must be one of {', '.join(_REDUCTIONS)}, but got "
            f"{reduction!r}."
        )
    free = sorted(names - set(blocked.split()))

    def factors(op: Operator) -> list[Factor]:
        _check_ranks(op, equation, operands, results)
        return [_factor(op, dim, operands, results, reduction) for dim in free]

    def bind(op: Operator, shards: Sequence[Any], shard: Shard) -> list[Any]:
        made = _run(op, shards, local, is_kernel)
        _check_results(op, made, shard, has_local=local is not None)
        return made

    replace_rule(name, Rule(factors, bind))


def _check_kernel(name: str, local: LocalFunction | None) -> bool:
    """Whether the rule is of a kernel, which must have a name and a local function."""
    kind, colon, kernel = name.partition(":")
    if kind in KERNEL_NAMES and not kernel:
        raise ValueError(
            f"One primitive {kind!r} runs every kernel, so a rule must name the one it "
            f"is of, as in '{kind}:my_kernel', but got {name!r}."
        )
    if colon and local is None:
        raise ValueError(
            f"The rule of a kernel needs `local`, as the params of {kind!r} hold the "
            f"shapes of whole arrays, but the one of {name!r} has none; give the "
            f"function that calls the kernel."
        )
    return bool(colon)


def _run(
    op: Operator, shards: Sequence[Any], local: LocalFunction | None, is_kernel: bool
) -> list[Any]:
    if local is None:
        return bind_params(op, shards)
    made = local(*shards, **({} if is_kernel else op.params))
    return list(made) if isinstance(made, tuple | list) else [made]


def _check_results(
    op: Operator, made: Sequence[Any], shard: Shard, *, has_local: bool
) -> None:
    wanted = [shard.result_shape(op, i) for i in range(len(op.results))]
    found = [tuple(result.shape) for result in made]
    if wanted != found:
        remedy = "correct it" if has_local else "pass `local`, which may know better"
        raise ValueError(
            f"On shards, {rule_name(op)!r} must make results of the shapes {wanted}, "
            f"as its rule says, but it makes {found}; {remedy}, or block the split "
            f"names."
        )


def _parse(equation: str) -> tuple[list[list[str]], list[list[str]]]:
    sides = equation.split("->")
    if len(sides) != 2:
        raise ValueError(
            f"A rule must have exactly one '->' between operands and results, as in "
            f"'b m k, b k n -> b m n', but got {equation!r}."
        )
    operands, results = ([term.split() for term in side.split(",")] for side in sides)
    for term in [*operands, *results]:
        named = [dim for dim in term if dim != "_"]
        if len(set(named)) != len(named):
            raise ValueError(
                f"A name may occur once in each term of a rule, but "
                f"{' '.join(term)!r} in {equation!r} repeats one; write '_' for a dim "
                f"that stays whole."
            )
    return operands, results


def _check_ranks(
    op: Operator,
    equation: str,
    operands: Sequence[Sequence[str]],
    results: Sequence[Sequence[str]],
) -> None:
    terms = [*operands, *results]
    types = [*op.operand_types, *op.result_types]
    wanted, found = [len(term) for term in terms], [kind.rank for kind in types]
    if wanted != found or len(operands) != len(op.operands):
        raise ValueError(
            f"The rule {equation!r} of {rule_name(op)!r} must name the dims of its "
            f"operands and results, whose ranks are {found}, but it names {wanted}."
        )
    sizes: dict[str, int] = {}
    for term, kind in zip(terms, types, strict=True):
        for dim, size in zip(term, kind.shape, strict=True):
            if dim != "_" and sizes.setdefault(dim, size) != size:
                raise ValueError(
                    f"Dims of one name must have one size, but {dim!r} in the rule "
                    f"{equation!r} of {rule_name(op)!r} has {sizes[dim]} and {size}; "
                    f"give them different names, or write '_'."
                )


def _factor(
    op: Operator,
    dim: str,
    operands: Sequence[Sequence[str]],
    results: Sequence[Sequence[str]],
    reduction: Reduction,
) -> Factor:
    def state(term: Sequence[str], missing: State) -> State:
        return term.index(dim) if dim in term else missing

    size = next(
        kind.shape[term.index(dim)]
        for term, kind in zip(operands, op.operand_types, strict=True)
        if dim in term
    )
    return Factor(
        dim,
        tuple(state(term, REPLICATED) for term in operands),
        tuple(state(term, _REDUCTIONS[reduction]) for term in results),
        size,
    )
