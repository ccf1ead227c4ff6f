"""Operations on elements, products, reductions, sorts, and values from nothing."""

from __future__ import annotations

from tests.fuzz.operations import Written, operation
from tests.fuzz.scope import (
    Scope,
    Unfit,
    is_bool,
    is_complex,
    is_float,
    is_inexact,
    is_integer,
    is_key,
    is_number,
)

# Every one is bounded and smooth enough that rounding stays rounding.
SMOOTH = """
    jnp.tanh({x}) | jnp.sin({x}) | -{x} | jnp.cos({x}) | jnp.exp(-{x} * {x})
    jnp.abs({x}) | 0.5 * {x} | {x} + 1 | 0 + {x} | {x} / 2 | 1 - {x}
    jnp.log1p({x} * {x}) | jnp.sqrt(1 + {x} * {x}) | lax.rsqrt(1 + {x} * {x})
    nn.relu({x}) | nn.gelu({x}) | nn.silu({x}) | nn.softplus({x}) | nn.sigmoid({x})
    jnp.square(jnp.tanh({x})) | lax.integer_pow(jnp.tanh({x}), 3)
    jnp.cbrt(1 + {x} * {x}) | jnp.expm1(-jnp.abs({x})) | lax.erf({x}) | lax.erfc({x})
    lax.erf_inv(0.9 * jnp.tanh({x})) | jnp.arctan({x}) | jnp.arcsinh({x})
    jnp.arccosh(2 + {x} * {x}) | jnp.arctanh(0.9 * jnp.tanh({x}))
    jnp.arcsin(0.9 * jnp.tanh({x})) | jnp.arccos(0.9 * jnp.tanh({x}))
    jnp.sinh(jnp.tanh({x})) | jnp.cosh(jnp.tanh({x})) | jnp.tan(0.5 * jnp.tanh({x}))
    lax.lgamma(1.5 + jnp.tanh({x})) | lax.digamma(1.5 + jnp.tanh({x}))
    lax.bessel_i0e({x}) | lax.bessel_i1e({x}) | jnp.exp2(-{x} * {x})
    jnp.log(1.5 + {x} * {x}) | lax.reduce_precision({x}, 8, 7) | jnp.copy({x})
    lax.stop_gradient({x}) | jax.ad_checkpoint.checkpoint_name({x}, 'name')
    jnp.nan_to_num({x}) | lax.optimization_barrier({x}) | jnp.where({x} > 0, {x}, 0)
    jnp.clip({x}, -1, 1) | {x} % 1.5 | jnp.pow(1.5 + jnp.tanh({x}), 1.5)
    jax.device_put({x}) | lax.logistic({x}) | jnp.max(jnp.stack([{x}, -{x}]), 0)
"""
ROUGH = """
    jnp.floor(3 * {x}) | jnp.ceil(3 * {x}) | jnp.round(3 * {x}) | jnp.sign({x})
    jnp.isfinite({x}) | lax.nextafter({x}, 2 * {x}) | jnp.trunc(2 * {x})
    lax.bitcast_convert_type({x}, jnp.uint8) | {x} > 0 | jnp.isnan({x})
    lax.polygamma(1.0 + 0 * {x}, 1.5 + {x} * {x})
"""
BINARY = """
    {x} + {y} | {x} * {y} | {x} - {y} | {x} / (1 + {y} * {y}) | jnp.maximum({x}, {y})
    jnp.minimum({x}, {y}) | jnp.arctan2({x}, 1.5 + {y} * {y}) | jnp.hypot({x}, 1 + {y})
    jnp.power(1.5 + jnp.tanh({x}), jnp.tanh({y})) | jnp.logaddexp({x}, {y})
    jnp.where({x} > {y}, {x}, {y}) | {x} % (1.5 + jnp.abs({y}))
"""
SPECIAL = """
    jax.scipy.special.gammainc(1.5 + {x} * {x}, 1 + {y} * {y})
    jax.scipy.special.gammaincc(1.5 + {x} * {x}, 1 + {y} * {y})
    jax.scipy.special.betainc(1.5 + jnp.tanh({x}), 1.5 + jnp.tanh({y}), 0.5 + 0 * {x})
    jax.scipy.special.zeta(2.5 + jnp.tanh({x}), 2.5 + jnp.tanh({y}))
    {x} > {y} | {x} <= {y} | {x} == {y} | lax.nextafter({x}, {y}) | {x} // (1 + {y}**2)
"""
INTEGER = """
    {x} + {y} | {x} - {y} | {x} * {y} | {x} & {y} | {x} | {y} | {x} ^ {y} | {x} == {y}
    jnp.maximum({x}, {y}) | {x} // (1 + {y} * {y}) | {x} % (1 + {y} * {y}) | {x} < {y}
    lax.shift_left({x}, ({y} % 5).astype({x}.dtype)) | {x} != {y} | {x} >= {y}
    lax.shift_right_logical({x}, ({y} % 5).astype({x}.dtype))
    lax.shift_right_arithmetic({x}, ({y} % 5).astype({x}.dtype))
"""
INTEGER_UNARY = """
    -{x} | ~{x} | jnp.abs({x}) | jnp.sign({x}) | lax.population_count({x})
    lax.clz({x}) | {x} > 2 | {x} % 5 | lax.integer_pow({x}, 2) | {x} * 3
"""


def _texts(table: str) -> list[str]:
    # `|` is a separator with a space on either side, or an operator between names.
    joined = table.replace("{x} | {y}", "{x} @@ {y}").replace("\n", " | ")
    parts = (part.strip() for part in joined.split(" | "))
    return [part.replace("@@", "|") for part in parts if part]


_SMOOTH, _ROUGH, _BINARY = _texts(SMOOTH), _texts(ROUGH), _texts(BINARY)
_SPECIAL, _INTEGER, _INTEGER_UNARY = map(_texts, (SPECIAL, INTEGER, INTEGER_UNARY))


@operation("elements", 6)
def smooth(s: Scope) -> Written:
    return s.one_of(*_SMOOTH).format(x=s.value(is_float))


@operation("elements", 6)
def binary(s: Scope) -> Written:
    x = s.value(is_float)
    return s.one_of(*_BINARY).format(x=x, y=s.like(x, is_float))


@operation("elements", 1, smooth=False)
def rough(s: Scope) -> Written:
    return s.one_of(*_ROUGH).format(x=s.value(is_float))


@operation("elements", 1, smooth=False)
def special(s: Scope) -> Written:
    x = s.value(is_float)
    return s.one_of(*_SPECIAL).format(x=x, y=s.like(x, is_float))


@operation("elements", 2)
def integer(s: Scope) -> Written:
    x = s.value(is_integer)
    if s.flag():
        return s.one_of(*_INTEGER_UNARY).format(x=x)
    return s.one_of(*_INTEGER).format(x=x, y=s.like(x, is_integer))


@operation("elements", 1)
def logical(s: Scope) -> Written:
    x = s.value(is_bool)
    name = s.one_of("and", "or", "xor", "not")
    if name == "not":
        return f"jnp.logical_not({x})"
    return f"jnp.logical_{name}({x}, {s.like(x, is_bool)})"


@operation("elements", 2)
def complex_(s: Scope) -> Written:
    try:
        x = s.value(is_complex)
    except Unfit:
        x = s.value(is_float)
        return f"lax.complex({x}, jnp.cos({x}))"
    texts = ("{x}.real", "{x}.imag", "jnp.conj({x})", "{x} * (0.5 + 0.5j)", "-{x}")
    texts += ("jnp.abs({x})**2", "{x} / (1 + 1j)", "{x} * jnp.conj({x})")
    return s.one_of(*texts).format(x=x)


@operation("elements", 3)
def cast(s: Scope) -> Written:
    x = s.value(is_number)
    kind = s.types[x]
    if is_complex(kind):
        return f"{x}.real.astype(jnp.float32)"
    if is_float(kind):
        names = ("float32", "bfloat16", "float16", "float64", "complex64")
        if s.flag():
            return f"{x}.astype(jnp.{s.one_of(*names)})"
        name = s.one_of("int32", "int8", "bool_", "uint8", "int16")
        return f"(3.3 * jnp.tanh({x})).astype(jnp.{name})"
    names = ("float32", "int32", "bfloat16", "int8", "uint32", "bool_", "uint8")
    return f"({x} % 64).astype(jnp.{s.one_of(*names)})"


@operation("elements", 2)
def select(s: Scope) -> Written:
    x = s.value(is_number)
    y = s.same(x, lambda kind: kind.dtype == s.types[x].dtype)
    which = s.like(x, is_bool if s.flag() else is_integer)
    if is_bool(s.types[which]):
        return f"jnp.where({which}, {x}, {y})"
    z = s.same(x, lambda kind: kind.dtype == s.types[x].dtype)
    return f"lax.select_n(({which} % 3).astype(jnp.int32), {x}, {y}, {z})"


@operation("elements", 1)
def clamp(s: Scope) -> Written:
    x = s.value(is_float)
    if s.flag():
        low = s.same(x, lambda kind: kind.dtype == s.types[x].dtype)
        return f"lax.clamp({low} - 1, {x}, {low} + 1)"
    return f"lax.clamp(-0.5 * jnp.ones((), {x}.dtype), {x}, jnp.ones((), {x}.dtype))"


@operation("reductions", 5)
def reduce(s: Scope) -> Written:
    x = s.value(is_inexact)
    axes = s.dims(x)
    keep = s.one_of("", ", keepdims=True")
    names = ["sum", "mean", "sum"]
    if not is_complex(s.types[x]):
        names += ["max", "min", "prod", "logsumexp"]
    name = s.one_of(*names)
    if name in ("max", "min") and not all(s.shape(x)):
        raise Unfit
    if name == "sum":
        scale = 1
        for axis in axes:
            scale *= max(1, s.shape(x)[axis])
        return f"jnp.sum({x}, {axes}{keep}) / {scale}"
    if name == "prod":
        return f"jnp.prod(1 + 0.1 * jnp.tanh({x}), {axes}{keep})"
    module = "nn" if name == "logsumexp" else "jnp"
    return f"{module}.{name}({x}, {axes}{keep})"


@operation("reductions", 2)
def reduce_discrete(s: Scope) -> Written:
    x = s.value(lambda kind: is_integer(kind) or is_bool(kind))
    axes = s.dims(x)
    names = ["any", "all", "sum", "max", "min"] if all(s.shape(x)) else ["any", "sum"]
    return f"jnp.{s.one_of(*names)}({x}, {axes})"


@operation("reductions", 1, smooth=False)
def reduce_by_function(s: Scope) -> Written:
    x = s.value(lambda kind: is_integer(kind) or is_bool(kind))
    name = s.one_of("bitwise_xor", "bitwise_or", "bitwise_and", "mul", "two")
    if name == "two":
        zero = f"np.zeros((), {x}.dtype)[()]"
        pair = "lambda a, b: (a[0] + b[0], jnp.maximum(a[1], b[1]))"
        return f"lax.reduce(({x}, {x}), ({zero}, {zero}), {pair}, {s.dims(x)})", 2
    start = f"np.ones((), {x}.dtype)[()]"
    return f"lax.reduce({x}, {start}, lax.{name}, {s.dims(x)})"


@operation("reductions", 1, smooth=False)
def argument_of(s: Scope) -> Written:
    x = s.value(is_number, least=1, size=True)
    x_text = f"{x}.real" if is_complex(s.types[x]) else x
    return f"jnp.{s.one_of('argmax', 'argmin')}({x_text}, {s.dim(x)})"


@operation("reductions", 2)
def cumulate(s: Scope) -> Written:
    x = s.value(is_float, least=1)
    name = s.one_of("cumsum", "cummax", "cummin", "cumprod", "cumlogsumexp")
    x_text = f"(1 + 0.1 * jnp.tanh({x}))" if name == "cumprod" else f"0.3 * {x}"
    return f"lax.{name}({x_text}, {s.dim(x)}, reverse={s.flag()})"


@operation("reductions", 1)
def sort(s: Scope) -> Written:
    x = s.value(lambda kind: is_float(kind) or is_integer(kind), least=1, size=True)
    axis, rank = s.dim(x), len(s.shape(x))
    texts = [f"jnp.sort({x}, {axis})", f"jnp.sort({x}, {axis}, descending=True)"]
    texts.append(f"lax.top_k({x}, {min(2, s.shape(x)[-1])})[0]")
    if not s.differentiable:
        texts.append(f"jnp.argsort({x}, {axis})")
        texts.append(f"lax.top_k({x}, {min(2, s.shape(x)[-1])})[1]")
        texts.append(f"lax.sort(({x}, {x} > 0), dimension={axis}, num_keys=2)[1]")
        texts.append(f"lax.approx_max_k({x}, 1, reduction_dimension={rank - 1})[0]")
    return s.one_of(*texts)


@operation("products", 5)
def dot(s: Scope) -> Written:
    """A product with any batch and contracted dims of equal sizes."""
    x = s.value(is_inexact, least=1)
    y = s.value(lambda kind: kind.dtype == s.types[x].dtype, least=1)
    left, right, scale = s.shape(x), s.shape(y), 1
    contracted: tuple[list[int], list[int]] = ([], [])
    batched: tuple[list[int], list[int]] = ([], [])
    free = list(range(len(right)))
    for i, size in enumerate(left):
        dims = [j for j in free if right[j] == size]
        if not dims or s.draw.randrange(3) == 2:
            continue
        j = s.draw.choice(dims)
        free.remove(j)
        pair = s.one_of(contracted, batched)
        pair[0].append(i)
        pair[1].append(j)
        scale *= max(size, 1) if pair is contracted else 1
    numbers = f"({contracted}, {batched})"
    options = s.one_of("", "", ", preferred_element_type=jnp.float32")
    if is_complex(s.types[x]):
        options = ""
    return f"lax.dot_general({x}, {y}, {numbers}{options}) / {scale}"


@operation("products", 1)
def dot_of_integers(s: Scope) -> Written:
    x = s.value(is_integer, least=1)
    y = s.value(is_integer, lambda kind: kind.shape[0] == s.shape(x)[-1], least=1)
    return f"jnp.tensordot({x} % 8, {y} % 8, 1)"


@operation("products", 1)
def ragged_dot(s: Scope) -> Written:
    x = s.value(is_float, rank=2, size=True)
    rows, inner = s.shape(x)
    half = rows // 2
    weights = f"jnp.ones((2, {inner}, 8), {x}.dtype) * jnp.mean({x})"
    return f"lax.ragged_dot({x}, {weights}, np.array([{half}, {rows - half}]))"


@operation("products", 2)
def softmax(s: Scope) -> Written:
    x = s.value(is_float, least=1, size=True)
    name = s.one_of("softmax", "log_softmax", "standardize")
    return f"nn.{name}({x}, {s.dim(x)})"


@operation("products", 1)
def linear_algebra(s: Scope) -> Written:
    x = s.value(lambda kind: kind.dtype in ("float32", "float64"), least=2, size=True)
    *batch, rows, columns = s.shape(x)
    if rows > 8 or columns > 8:
        raise Unfit
    axes = (*range(len(batch)), len(batch) + 1, len(batch))
    squared = f"jnp.tanh({x}) @ jnp.tanh({x}).transpose({axes}) / {columns}"
    positive = f"({squared} + jnp.eye({rows}, dtype={x}.dtype))"
    return s.one_of(
        f"jnp.linalg.cholesky({positive})",
        f"jnp.linalg.solve({positive}, {x})",
        f"jnp.linalg.inv({positive})",
        f"lax.linalg.triangular_solve({positive}, {x}, left_side=True, lower=True)",
        f"jnp.fft.fft({x}, axis=-1).real / {columns}",
        f"jnp.linalg.eigvalsh({positive})",
        f"jnp.linalg.svd({positive}, compute_uv=False)",
        f"jnp.linalg.qr({positive})[1]",
    )


@operation("values", 2)
def constant(s: Scope) -> Written:
    shape = tuple(s.size() for _ in range(s.draw.randrange(4)))
    dtype = s.one_of("float32", "int32", "bfloat16", "bool_", "uint8", "complex64")
    count = 1
    for size in shape:
        count *= size
    texts = [f"jnp.zeros({shape}, jnp.{dtype})", f"jnp.ones({shape}, jnp.{dtype})"]
    texts.append(f"jnp.full({shape}, 0.5)")
    texts.append(
        f"jnp.asarray(np.linspace(-1, 1, {count}, dtype='f').reshape({shape}))"
    )
    if shape:
        dim = s.draw.randrange(len(shape))
        kind = s.one_of("float32", "int32", "uint8", "bfloat16")
        texts.append(f"lax.broadcasted_iota(jnp.{kind}, {shape}, {dim})")
    return s.one_of(*texts)


@operation("values", 2)
def key(s: Scope) -> Written:
    x = s.value(is_key)
    texts = [f"jax.random.fold_in({x}, 3)", f"jax.random.clone({x})"]
    texts += [f"jax.random.split({x}, {s.one_of(2, 4)})", f"jax.random.split({x})[0]"]
    if s.shape(x):
        texts = [f"{x}[0]", f"jax.vmap(lambda k: jax.random.fold_in(k, 1))({x})"]
    return s.one_of(*texts)


@operation("values", 4)
def random_values(s: Scope) -> Written:
    try:
        x = s.value(is_key)
    except Unfit:
        x = f"jax.random.key({s.draw.randrange(5)})"
        texts: tuple[str, ...] = ()
    else:
        texts = (f"jax.random.key_data({x})",) if s.shape(x) else ()
    shape = tuple(s.size() for _ in range(s.draw.randrange(4)))
    texts += (
        f"jax.random.normal({{k}}, {shape})",
        f"jax.random.uniform({{k}}, {shape}, minval=-1)",
        f"jax.random.bits({{k}}, {shape}, jnp.{s.one_of('uint8', 'uint16', 'uint32')})",
        f"jax.random.bernoulli({{k}}, 0.5, {shape})",
        f"jax.random.randint({{k}}, {shape}, 0, 10)",
        f"jax.random.permutation({{k}}, {s.size()})",
        f"jax.random.truncated_normal({{k}}, -1, 1, {shape}, jnp.float32)",
    )
    text = s.one_of(*texts)
    if x.startswith("v") and s.shape(x) and "{k}" in text:
        return f"jax.vmap(lambda k: {text.format(k='k')})({x})"
    return text.format(k=x)


@operation("values", 1)
def dropout(s: Scope) -> Written:
    x, k = s.value(is_float), s.value(is_key, rank=0)
    return f"jnp.where(jax.random.bernoulli({k}, 0.5, {x}.shape), 2 * {x}, 0)"
