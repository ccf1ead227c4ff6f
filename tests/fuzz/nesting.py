"""Operations that hold other operations: loops, branches, calls, derivatives, vmap."""

from __future__ import annotations

from typing import Any

import jax

from tests.fuzz.operations import OPERATIONS, Written, operation
from tests.fuzz.scope import (
    Scope,
    Unfit,
    is_bool,
    is_float,
    is_inexact,
    is_integer,
    is_key,
    is_number,
)

MAX_DEPTH = 2


def grow(s: Scope, count: int, weights: dict[str, int] | None = None) -> None:
    """Draw `count` operations and write those that fit."""
    names = [
        name
        for name, each in OPERATIONS.items()
        if (each.smooth or not s.differentiable)
        and (each.topic != "nesting" or s.depth < MAX_DEPTH)
        for _ in range(each.weight * (weights or {}).get(each.topic, 1))
    ]
    for _ in range(count):
        for _ in range(3):  # what does not fit is drawn again
            name = s.draw.choice(names)
            s.reset()
            try:
                written = OPERATIONS[name].write(s)
            except Unfit:
                continue
            text, length = (written, None) if isinstance(written, str) else written
            if s.emit(name, text, length):
                break
    s.reset()


def _without_dim(kind: Any, dim: int = 0) -> Any:
    shape = kind.shape[:dim] + kind.shape[dim + 1 :]
    return jax.ShapeDtypeStruct(shape, kind.dtype)


def _tuple(texts: list[str]) -> str:
    return f"({''.join(f'{text}, ' for text in texts)})"


def _carries(s: Scope) -> list[str]:
    count = 1 + s.draw.randrange(3)
    names = [s.value(is_number) for _ in range(count)]
    if s.draw.randrange(4) == 3:
        names.append(s.value(is_key, rank=0))
    return names


def _body_size(s: Scope) -> int:
    return 1 + s.draw.randrange(4)


@operation("nesting", 5)
def scan(s: Scope) -> Written:
    """Carries, slices and stacked results, forwards or reversed."""
    carries = _carries(s)
    first = s.value(is_number, least=1)
    length = s.shape(first)[0]
    slices = [first]
    if s.flag():
        slices.append(s.value(lambda kind: kind.shape[:1] == (length,), least=1))
    used = list(s.used)
    kinds = [s.types[name] for name in carries]
    inner = s.nested([*kinds, *(_without_dim(s.types[name]) for name in slices)])
    parameters = list(inner.own)
    grow(inner, _body_size(s))
    carried = [
        s.coerced(inner, kind, name)
        for kind, name in zip(kinds, parameters, strict=False)
    ]
    stacked = [s.draw.choice(inner.own[::-1]) for _ in range(s.draw.randrange(3))]
    s.used = used
    count = len(carries)
    name = s.fresh("g")
    flat = s.define(inner, parameters, f"{_tuple(carried)}, {_tuple(stacked)}")
    s.preamble.append(f"def {name}(c, x):\n    return {flat}(*c, *x)")
    options = s.one_of("", "", ", reverse=True", f", unroll={max(1, length // 2)}")
    call = f"lax.scan({name}, {_tuple(carries)}, {_tuple(slices)}{options})"
    return f"jax.tree.leaves({call})", count + len(stacked)


@operation("nesting", 3)
def fori_loop(s: Scope) -> Written:
    carries = _carries(s)
    used, kinds = list(s.used), [s.types[name] for name in carries]
    step = jax.ShapeDtypeStruct((), "int32")
    inner = s.nested([step, *kinds])
    parameters = list(inner.own)
    grow(inner, _body_size(s))
    carried = [
        s.coerced(inner, kind, name)
        for kind, name in zip(kinds, parameters[1:], strict=True)
    ]
    s.used = used
    flat = s.define(inner, parameters, _tuple(carried))
    end = s.one_of(1, 2, 3)
    call = f"lambda i, c: {flat}(i, *c), {_tuple(carries)}"
    return f"lax.fori_loop(0, {end}, {call})", len(carries)


@operation("nesting", 2, smooth=False)
def while_loop(s: Scope) -> Written:
    """A counter and a bound from data, so that the trips are not known."""
    carries = _carries(s)
    bound = f"jnp.max({s.value(is_integer, size=True)} % 4).astype(jnp.int32)"
    used, kinds = list(s.used), [s.types[name] for name in carries]
    inner = s.nested(kinds)
    parameters = list(inner.own)
    grow(inner, _body_size(s))
    carried = [
        s.coerced(inner, kind, name)
        for kind, name in zip(kinds, parameters, strict=True)
    ]
    s.used = used
    flat = s.define(inner, parameters, _tuple(carried))
    floats = [i for i, kind in enumerate(kinds) if is_float(kind) and kind.size]
    more = f" & (jnp.sum(c[1][{floats[0]}]) < 1e6)" if floats and s.flag() else ""
    condition, body = s.fresh("g"), s.fresh("g")
    s.preamble.append(f"def {condition}(c):\n    return (c[0] < {bound}){more}")
    s.preamble.append(f"def {body}(c):\n    return c[0] + 1, {flat}(*c[1])")
    start = f"(jnp.int32(0), {_tuple(carries)})"
    return f"lax.while_loop({condition}, {body}, {start})[1]", len(carries)


@operation("nesting", 4)
def branch(s: Scope) -> Written:
    """`cond` and `switch` on a value of data."""
    operands = _carries(s)
    which = s.value(is_integer if s.flag() else is_bool, size=True)
    used, kinds = list(s.used), [s.types[name] for name in operands]
    count = 2 if is_bool(s.types[which]) else s.one_of(2, 3)
    flats = []
    for _ in range(count):
        inner = s.nested(kinds)
        parameters = list(inner.own)
        grow(inner, s.draw.randrange(4))
        results = [
            s.coerced(inner, kind, name)
            for kind, name in zip(kinds, parameters, strict=True)
        ]
        before, s.used = s.used, []
        flats.append(s.define(inner, parameters, _tuple(results)))
        s.used = [*before, *s.used]
    s.used = [*used, *s.used]
    scalar, arguments = f"{which}.ravel()[0]", ", ".join(operands)
    if is_bool(s.types[which]):
        return f"lax.cond({scalar}, {', '.join(flats)}, {arguments})", len(operands)
    index = f"({scalar} % {count}).astype(jnp.int32)"
    branches = f"[{', '.join(flats)}]"
    return f"lax.switch({index}, {branches}, {arguments})", len(operands)


def _called(s: Scope, *, is_closed: bool = False) -> tuple[str, list[str], int]:
    """A nested function of one to three values; its name, operands, results."""
    operands = [s.value(is_number) for _ in range(1 + s.draw.randrange(3))]
    used, kinds = list(s.used), [s.types[name] for name in operands]
    inner = s.nested(kinds, is_closed=is_closed)
    parameters = list(inner.own)
    grow(inner, _body_size(s))
    results = [s.draw.choice(inner.own[::-1]) for _ in range(s.one_of(1, 2))]
    s.used = used
    return s.define(inner, parameters, _tuple(results)), operands, len(results)


@operation("nesting", 2)
def call(s: Scope) -> Written:
    name, operands, count = _called(s)
    wrapper = s.one_of("jax.jit", "jax.checkpoint", "jax.named_call")
    return f"{wrapper}({name})({', '.join(operands)})", count


@operation("nesting", 1)
def remat(s: Scope) -> Written:
    name, operands, count = _called(s)
    policy = s.one_of("dots_saveable", "nothing_saveable", "everything_saveable")
    policy = f"policy=jax.checkpoint_policies.{policy}"
    return f"jax.checkpoint({name}, {policy})({', '.join(operands)})", count


@operation("nesting", 2)
def vmap(s: Scope) -> Written:
    """Over a dim of every operand, or with some operands unbatched."""
    first = s.value(is_number, least=1, size=True)
    dim = s.dim(first)
    count = s.shape(first)[dim]
    operands: list[str] = [first]
    dims: list[int | None] = [dim]
    if s.flag():
        other = s.value(is_number)
        fitting = [d for d, n in enumerate(s.shape(other)) if n == count]
        operands.append(other)
        dims.append(s.draw.choice(fitting) if fitting else None)
    used = list(s.used)
    kinds = [
        s.types[name] if d is None else _without_dim(s.types[name], d)
        for name, d in zip(operands, dims, strict=True)
    ]
    inner = s.nested(kinds)
    parameters = list(inner.own)
    grow(inner, _body_size(s))
    result = inner.own[-1]
    s.used = used
    name = s.define(inner, parameters, result)
    end = s.draw.randrange(len(inner.types[result].shape) + 1)
    text = f"jax.vmap({name}, in_axes={tuple(dims)}, out_axes={end})"
    return f"{text}({', '.join(operands)})"


@operation("nesting", 1)
def lax_map(s: Scope) -> Written:
    x = s.value(is_number, least=1, size=True)
    used = list(s.used)
    inner = s.nested([_without_dim(s.types[x])])
    parameters = list(inner.own)
    grow(inner, _body_size(s))
    s.used = used
    name = s.define(inner, parameters, inner.own[-1])
    return f"lax.map({name}, {x})"


@operation("nesting", 1)
def custom_vjp(s: Scope) -> Written:
    """A function with its own derivative, of floats and an integer without one."""
    x = s.value(is_float)
    used = list(s.used)
    inner = s.nested([s.types[x]], is_closed=True)
    parameters = list(inner.own)
    grow(inner, _body_size(s))
    result = s.coerced(inner, s.types[x], parameters[0])
    s.used = used
    name = s.define(inner, [*parameters, "n"], result, prefix="@jax.custom_vjp\n")
    s.preamble.append(
        f"{name}.defvjp(lambda x, n: ({name}(x, n), x), "
        f"lambda x, g: (g * jnp.cos(x), np.zeros((), jax.dtypes.float0)))"
    )
    return f"{name}({x}, 2)"


@operation("nesting", 1)
def custom_jvp(s: Scope) -> Written:
    x = s.value(is_float)
    used = list(s.used)
    inner = s.nested([s.types[x]], is_closed=True)
    parameters = list(inner.own)
    grow(inner, _body_size(s))
    result = s.coerced(inner, s.types[x], parameters[0])
    s.used = used
    name = s.define(inner, parameters, result, prefix="@jax.custom_jvp\n")
    s.preamble.append(f"{name}.defjvp(lambda p, t: ({name}(*p), t[0] * jnp.sin(p[0])))")
    return f"{name}({x})"


@operation("nesting", 1, smooth=False)
def derivative(s: Scope) -> Written:
    """Forward mode, or the gradient of a sum, inside the program."""
    x = s.value(is_float)
    used = list(s.used)
    inner = s.nested([s.types[x]])
    inner.differentiable = True
    parameters = list(inner.own)
    grow(inner, _body_size(s))
    result = s.coerced(inner, s.types[x], parameters[0])
    s.used = used
    name = s.define(inner, parameters, result)
    if s.flag():
        return f"jax.jvp({name}, ({x},), (jnp.cos({x}),))", 2
    return f"jax.grad(lambda x: jnp.mean({name}(x)).astype(jnp.float32))({x})"


@operation("nesting", 1)
def associative_scan(s: Scope) -> Written:
    x = s.value(is_inexact, least=1, size=True)
    function = s.one_of("jnp.add", "jnp.maximum", "lambda a, b: 0.5 * (a + b)")
    return f"lax.associative_scan({function}, {x}.real, axis={s.dim(x)})"
