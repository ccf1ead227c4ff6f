"""Operations that move elements: reshape, join, slice, gather, scatter, window."""

from __future__ import annotations

from math import prod

from tests.fuzz.operations import Written, operation
from tests.fuzz.scope import (
    Scope,
    Unfit,
    is_bool,
    is_float,
    is_inexact,
    is_integer,
    is_number,
)


@operation("shapes", 3)
def reshape(s: Scope) -> Written:
    """Dims are merged, split by a divisor, or given a size of 1."""
    x = s.value(is_number)
    shape = list(s.shape(x))
    for _ in range(1 + s.draw.randrange(2)):
        d = s.draw.randrange(len(shape) + 1)
        if d == len(shape):
            shape.append(1)
        elif d + 1 < len(shape) and s.flag():
            shape[d : d + 2] = [shape[d] * shape[d + 1]]
        else:
            divisors = [n for n in (2, 3, 4, 8) if shape[d] and shape[d] % n == 0]
            if divisors:
                n = s.draw.choice(divisors)
                shape[d : d + 1] = s.one_of([n, shape[d] // n], [shape[d] // n, n])
    if s.draw.randrange(6) == 5:
        shape = [prod(shape)]
    if s.draw.randrange(6) == 5:
        order = s.draw.sample(range(len(s.shape(x))), len(s.shape(x)))
        return f"lax.reshape({x}, {tuple(shape)}, {tuple(order)})"
    return f"{x}.reshape({tuple(shape)})"


@operation("shapes", 3)
def transpose(s: Scope) -> Written:
    x = s.value(is_number, least=2)
    order = list(range(len(s.shape(x))))
    s.draw.shuffle(order)
    return f"jnp.transpose({x}, {tuple(order)})"


@operation("shapes", 3)
def broadcast(s: Scope) -> Written:
    x = s.value(is_number)
    shape = [s.size() if n == 1 and s.flag() else n for n in s.shape(x)]
    if s.flag():
        shape = [s.size(), *shape]
    elif s.flag():
        dim = s.draw.randrange(len(shape) + 1)
        return f"jnp.expand_dims({x}, {dim})"
    return f"jnp.broadcast_to({x}, {tuple(shape)})"


@operation("shapes", 2)
def rearrange(s: Scope) -> Written:
    x = s.value(is_number, least=1)
    d = s.dim(x)
    texts = [f"jnp.flip({x}, {d})", f"jnp.roll({x}, {s.one_of(1, -2)}, {d})"]
    texts += [
        f"jnp.repeat({x}, 2, {d})",
        f"jnp.squeeze({x})",
        f"jnp.moveaxis({x}, {d}, 0)",
    ]
    if len(s.shape(x)) == 2:
        texts += [f"jnp.tile({x}, (2, 1))", f"jnp.tril({x})", f"{x}.T"]
    else:
        texts.append(f"jnp.tile({x}, 2)")
    return s.one_of(*texts)


@operation("shapes", 2)
def concatenate(s: Scope) -> Written:
    x = s.value(is_number, least=1)
    d = s.dim(x)
    rest = [n for i, n in enumerate(s.shape(x)) if i != d]

    def fits(kind: object) -> bool:
        shape = list(kind.shape)  # type: ignore[attr-defined]
        return len(shape) > d and shape[:d] + shape[d + 1 :] == rest

    y = s.value(is_number, fits, lambda kind: kind.dtype == s.types[x].dtype)
    if s.shape(x) == s.shape(y) and s.flag():
        return f"jnp.stack([{x}, {y}], {d})"
    return f"jnp.concatenate([{x}, {y}], {d})"


@operation("shapes", 2)
def pad(s: Scope) -> Written:
    x = s.value(is_number, least=1)
    widths = [
        s.one_of((0, 0, 0), (0, 0, 0), (1, 0, 0), (0, 2, 0), (-1, 1, 0), (1, 1, 1))
        for _ in s.shape(x)
    ]
    value = s.one_of("0", "1")
    return f"lax.pad({x}, np.array({value}, {x}.dtype), {widths})"


@operation("shapes", 3)
def slice_(s: Scope) -> Written:
    x = s.value(is_number, least=1)
    texts = []
    for size in s.shape(x):
        options = [":", ":"]
        if size > 1:
            options += [f":{size // 2}", f"1:{size}", "::2", "::-1", "0", "-1", "1:2"]
        texts.append(s.draw.choice(options))
    return f"{x}[{', '.join(texts)}]"


@operation("shapes", 1)
def split(s: Scope) -> Written:
    x = s.value(is_number, lambda kind: any(n and n % 2 == 0 for n in kind.shape))
    d = s.draw.choice([d for d, n in enumerate(s.shape(x)) if n and n % 2 == 0])
    if s.shape(x)[d] == 2 and s.flag():
        return f"jnp.unstack({x}, axis={d})", 2
    return f"jnp.split({x}, 2, {d})", 2


@operation("indexing", 2)
def dynamic_slice(s: Scope) -> Written:
    x = s.value(is_number, least=1)
    starts = [_start(s) for _ in s.shape(x)]
    sizes = tuple(s.one_of(n, n, (n + 1) // 2, min(n, 1)) for n in s.shape(x))
    return f"lax.dynamic_slice({x}, ({', '.join(starts)},), {sizes})"


@operation("indexing", 2)
def dynamic_update_slice(s: Scope) -> Written:
    x = s.value(is_number, least=1)
    shape = s.shape(x)
    dtype = s.types[x].dtype

    def fits(kind: object) -> bool:
        sizes = kind.shape  # type: ignore[attr-defined]
        return len(sizes) == len(shape) and all(map(lambda a, b: a <= b, sizes, shape))

    y = s.value(is_number, fits, lambda kind: kind.dtype == dtype)
    starts = [_start(s) for _ in shape]
    return f"lax.dynamic_update_slice({x}, {y}, ({', '.join(starts)},))"


def _start(s: Scope) -> str:
    """A start index: a literal, or a scalar or element of an integer value."""
    if s.flag():
        return s.one_of("0", "1", "3", "-1")
    try:
        i = s.value(is_integer, size=True)
    except Unfit:
        return "2"
    return f"({i} % 5).ravel()[0].astype(jnp.int32)"


def _indices(s: Scope, limit: int) -> str:
    """Index values that may be out of `limit` on both sides."""
    try:
        i = s.value(is_integer)
    except Unfit:
        return f"np.array([0, {limit}, 1, -1, {limit - 1}, 0, 2, 1])"
    text = s.one_of(f"({i} % {max(1, limit)})", i, i, f"({i} - 2)", f"(5 * {i})")
    return s.one_of(
        text, text, f"{text}.astype(jnp.int8)", f"{text}.astype(jnp.uint32)"
    )


_MODES = ("", "", ", mode='clip'", ", mode='fill'", ", mode='wrap'")


@operation("indexing", 4)
def take(s: Scope) -> Written:
    x = s.value(is_number, least=1, size=True)
    d = s.dim(x)
    fill = s.one_of("", ", fill_value=1") if s.flag() else ""
    mode = ", mode='fill'" if fill else s.one_of(*_MODES)
    return f"jnp.take({x}, {_indices(s, s.shape(x)[d])}, {d}{mode}{fill})"


@operation("indexing", 3)
def take_fancily(s: Scope) -> Written:
    x = s.value(is_number, least=1, size=True)
    i = _indices(s, s.shape(x)[0])
    texts = [f"{x}[{i}]", f"{x}.at[{i}].get(mode='fill', fill_value=0)"]
    if len(s.shape(x)) > 1:
        j = f"({_indices(s, s.shape(x)[1])} % 3)"
        texts += [f"{x}[:, {i}]", f"{x}[{i}, {j}]", f"{x}[..., {i}]", f"{x}[{i}, 1:]"]
        texts.append(f"{x}[{i}, :, None]")
    return s.one_of(*texts)


@operation("indexing", 3)
def take_along_axis(s: Scope) -> Written:
    x = s.value(is_number, least=1, size=True)
    i = s.value(is_integer, rank=len(s.shape(x)))
    d = s.dim(x)
    return (
        f"jnp.take_along_axis({x}, {i} % {s.shape(x)[d]}, {d}{s.one_of(*_MODES[:4])})"
    )


@operation("indexing", 2)
def take_in_batches(s: Scope) -> Written:
    x = s.value(is_number, least=2, size=True)
    i = s.value(is_integer, lambda kind: kind.shape[0] == s.shape(x)[0], least=1)
    mode = s.one_of("clip", "fill", "wrap")
    return f"jax.vmap(lambda a, b: a.at[b].get(mode='{mode}'))({x}, {i})"


@operation("indexing", 4)
def scatter(s: Scope) -> Written:
    """Updates are scalars, or arrays where the order of equal indices is no matter."""
    x = s.value(is_number, least=1, size=True)
    d = s.dim(x)
    i = _indices(s, s.shape(x)[d])
    mode = s.one_of("", "", "mode='drop'", "mode='clip'", "mode='promise_in_bounds'")
    if "promise" in mode:
        i = f"(jnp.abs({i}) % {s.shape(x)[d]})"
    where = f"{x}.at[{', '.join([':'] * d + [i])}]"
    if is_bool(s.types[x]):
        return f"{where}.set(True{', ' + mode if mode else ''})"
    name = s.one_of("add", "add", "max", "min", "multiply", "set", "subtract")
    update = "0.5" if is_inexact(s.types[x]) else "2"
    if name not in ("set", "multiply") and s.flag():
        base = s.value(is_float)
        update = f"jnp.mean({base}).astype({x}.dtype)"
        if name in ("add", "subtract") and is_inexact(s.types[x]):
            update = f"jnp.sin(({i} + jnp.arange({i}.shape[-1])) * {update})"
            update = update if d == 0 and len(s.shape(x)) == 1 else "0.25"
    return f"{where}.{name}({update}{', ' + mode if mode else ''})"


@operation("indexing", 3)
def scatter_rows(s: Scope) -> Written:
    """An embedding's gradient, and its kin: whole rows are added at indices."""
    x = s.value(is_inexact, least=1, size=True)
    y = s.value(
        lambda kind: kind.dtype == s.types[x].dtype and kind.size,
        lambda kind: kind.shape[1:] == s.shape(x)[1:],
        least=1,
    )
    i = s.value(is_integer, lambda kind: kind.shape == s.shape(y)[:1])
    mode = s.one_of("", ", mode='drop'", ", mode='clip'")
    name = s.one_of("add", "add", "subtract", "max", "min")
    return f"{x}.at[{i}].{name}(0.5 * {y}{mode})"


@operation("indexing", 2)
def scatter_in_batches(s: Scope) -> Written:
    x = s.value(is_inexact, least=2, size=True)
    i = s.value(is_integer, lambda kind: kind.shape == s.shape(x)[:1])
    name = s.one_of("add", "set", "max", "multiply")
    return f"jax.vmap(lambda a, b: a.at[b].{name}(0.5))({x}, {i})"


@operation("indexing", 2)
def segment_sum(s: Scope) -> Written:
    x = s.value(is_inexact, least=1, size=True)
    i = s.value(is_integer, lambda kind: kind.shape == s.shape(x)[:1])
    count = s.size()
    return f"jax.ops.segment_sum({x}, {i}, num_segments={count}) / 4"


@operation("windows", 3)
def convolution(s: Scope) -> Written:
    """One or two spatial dims, with groups, strides and dilations."""
    rank = s.one_of(3, 4)
    x = s.value(lambda kind: kind.dtype in ("float32", "float64"), rank=rank, size=True)
    spatial = "HW"[: rank - 2]
    layout = s.one_of("NC" + spatial, "N" + spatial + "C", "C" + spatial + "N")
    channels = s.shape(x)[layout.index("C")]
    groups = s.one_of(*(g for g in (1, 1, 2, 4) if channels % g == 0))
    outputs = groups * s.one_of(2, 4)
    window = tuple(s.one_of(1, 2, 3) for _ in spatial)
    kernel = s.one_of("OI" + spatial, spatial + "IO")
    sizes = dict(zip(spatial, window, strict=True), O=outputs, I=channels // groups)
    shape = tuple(sizes[letter] for letter in kernel)
    count = prod(shape)
    weights = f"jnp.sin(jnp.arange({count}, dtype={x}.dtype)).reshape({shape})"
    strides = s.one_of((1,) * len(spatial), window)
    padding = s.one_of("'SAME'", "'VALID'", str([(1, 0)] * len(spatial)))
    dilation = s.one_of("", "", f", rhs_dilation={(2,) * len(spatial)}")
    numbers = (layout, kernel, layout)
    return (
        f"lax.conv_general_dilated({x}, {weights} * jnp.mean({x}), {strides}, "
        f"{padding}{dilation}, dimension_numbers={numbers}, "
        f"feature_group_count={groups}) / {count}"
    )


@operation("windows", 2)
def pool(s: Scope) -> Written:
    x = s.value(is_float, least=1, size=True)
    window = tuple(min(n, s.one_of(1, 1, 2, 3)) for n in s.shape(x))
    strides = s.one_of((1,) * len(window), window)
    name, start = s.one_of(("max", "-jnp.inf"), ("min", "jnp.inf"), ("add", "0.0"))
    padding = s.one_of("VALID", "SAME")
    shape = f"{window}, {strides}, '{padding}'"
    start = f"np.array({start}, {x}.dtype)[()]".replace("jnp.inf", "np.inf")
    return f"lax.reduce_window({x}, {start}, lax.{name}, {shape})"


@operation("windows", 1, smooth=False)
def pool_by_function(s: Scope) -> Written:
    x = s.value(is_integer, least=1, size=True)
    window = tuple(min(n, s.one_of(1, 2)) for n in s.shape(x))
    start = f"np.zeros((), {x}.dtype)[()]"
    shape = f"{window}, {(1,) * len(window)}, 'VALID'"
    return f"lax.reduce_window({x}, {start}, lax.bitwise_xor, {shape})"
