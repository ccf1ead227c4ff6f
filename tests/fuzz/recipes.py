"""One way or more to come by every primitive that has a rule, as lines of Python.

A table has a line for each, `primitive :: text`, or with ` @ranks` behind it. The text
names what it needs: `{x}` `{y}` `{z}` are float32 of one shape, `{i}` `{j}` int32,
`{u}` uint32, `{p}` `{q}` bool and `{c}` complex64 of that shape, `{k}` a key. `{s}` is
the shape, `{r}` its rank, `{d}` one of its dims and `{n}` the size of that, `{v}` the
other dims, `{w}` the shape but 1 at the dim, `{o}` but 1 at all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

# Why the primitive of a rule is in no program.
UNREACHABLE = {
    "log2": "absent from jax 0.10",
    "one_minus_square": "absent from jax 0.10",
    "autopar_attention": "no program's own: the planner puts it in place of products",
    "autopar_attention_backward": "as above",
    "autopar_fused_attention": "as above",
    "autopar_fused_attention_backward": "as above",
    "dot_product_attention_fwd_wrapper": "cuDNN's, which no CPU has",
    "dot_product_attention_bwd_wrapper": "as above",
    "pallas_call": "a kernel is a program; tests/rules/test_custom.py has its values",
}


@dataclass(frozen=True)
class Recipe:
    """Text of a line that makes one array with the primitive `kind`.

    The shape has `least` to `most` dims, and ends with `tail`.
    """

    kind: str
    text: str
    least: int = 0
    most: int = 5
    tail: tuple[int, ...] = ()


_UNARY = """
    abs asinh atan bessel_i0e bessel_i1e cbrt ceil cos erf erfc exp2 expm1 floor cosh
    is_finite logistic neg round sign sin sinh square tan tanh
"""
_BOUNDED = "acos asin atanh erf_inv"
_POSITIVE = "acosh digamma exp lgamma log log1p rsqrt sqrt"
_PAIRS = "add atan2 div eq ge gt le lt max min mul ne nextafter pow rem sub"
_BOUND = "eq_to le_to lt_to"
_INTEGER = "clz population_count"
_ALONG = "cumlogsumexp cummax cummin cumprod cumsum"

ELEMENTS = """
    add :: {c} + lax.conj({c})
    add_any :: jax.grad(lambda a: jnp.sum(jnp.sin(a) * jnp.tanh(a)))({x})
    and :: {p} & {q}
    autopar_relayout_like :: laid_like({x}, {y})
    bitcast_convert_type :: lax.bitcast_convert_type({x}, jnp.int32)
    bitcast_convert_type :: lax.bitcast_convert_type({x}, jnp.uint8)
    clamp :: lax.clamp({x} - 1, {y}, {x} + 1)
    clamp :: lax.clamp(-0.5 * jnp.ones(()), {x}, jnp.mean({y}) + 1)
    complex :: lax.complex({x}, {y})
    conj :: lax.conj({c})
    convert_element_type :: {x}.astype(jnp.bfloat16)
    convert_element_type :: {x}.astype(jnp.complex64)
    copy :: jnp.copy({x})
    device_put :: jax.device_put({x})
    div :: {c} / (2 + lax.abs({c}))
    empty :: 0 * lax.empty({s}, jnp.int32)
    empty2 :: jax.grad(branched)({x})
    igamma :: lax.igamma(1.5 + {x} * {x}, 1 + {y} * {y})
    igamma_grad_a :: lax.igamma_grad_a(1.5 + {x} * {x}, 1 + {y} * {y})
    igammac :: lax.igammac(1.5 + {x} * {x}, 1 + {y} * {y})
    imag :: lax.imag({c})
    integer_pow :: {x} ** 3
    iota :: lax.broadcasted_iota(jnp.float32, {s}, {d}) @1
    layout_constraint :: in_row_major({x})
    mul :: {c} * {c}
    mulhi :: lax.mulhi({i} * 2**28, {j} * 2**27)
    name :: jax.ad_checkpoint.checkpoint_name({x}, 'name')
    neg :: -{c}
    not :: ~{p}
    or :: {i} | {j}
    polygamma :: lax.polygamma(jnp.ones({s}), 1.5 + {x} * {x})
    real :: lax.real({c})
    reduce_precision :: lax.reduce_precision({x}, 8, 7)
    regularized_incomplete_beta :: lax.betainc(1 + {x}**2, 1 + {y}**2, 0.4 + 0 * {z})
    select_n :: lax.select_n({p}, {x}, {y})
    select_n :: lax.select_n({i} % 3, {x}, {y}, {z})
    shift_left :: lax.shift_left({i}, {j})
    shift_right_arithmetic :: lax.shift_right_arithmetic({i}, {j})
    shift_right_logical :: lax.shift_right_logical({u}, {u} % 9)
    stop_gradient :: primitives.stop_gradient_p.bind({x})
    threefry2x32 :: primitives.threefry2x32_p.bind({u}, {u} + 1, {u} * 3, {u} ^ 7)[1]
    xor :: {i} ^ {j}
    zeta :: lax.zeta(2.5 + jnp.tanh({x}), 2.5 + jnp.tanh({y}))
"""
REDUCTIONS = """
    approx_top_k :: lax.approx_max_k({x}, 1, reduction_dimension={d})[0] @1
    argmax :: jnp.argmax({x}, {d}) @1
    argmin :: jnp.argmin({x}, {d}) @1
    pmax :: jax.vmap(lambda a: lax.pmax(a, 'i'), {d}, {d}, axis_name='i')({x}) @1
    pmin :: jax.vmap(lambda a: lax.pmin(a, 'i'), {d}, {d}, axis_name='i')({x}) @1
    psum :: jax.vmap(lambda a: lax.psum(a, 'i'), {d}, {d}, axis_name='i')({x}) @1
    reduce :: lax.reduce({i}, np.int32(1), lambda a, b: a * b % 64, ({d},)) @1
    reduce_and :: lax.reduce_and({p} | {q}, ({d},)) @1
    reduce_and :: lax.reduce_and({p} | {q}, {v}) @1
    reduce_max :: lax.reduce_max({x}, ({d},)) @1
    reduce_max :: lax.reduce_max({x}, {v}) @1
    reduce_min :: lax.reduce_min({x}, ({d},)) @1
    reduce_min :: lax.reduce_min({x}, {v}) @1
    reduce_or :: lax.reduce_or({p} & {q}, ({d},)) @1
    reduce_or :: lax.reduce_or({p} & {q}, {v}) @1
    reduce_prod :: lax.reduce_prod(1 + 0.1 * jnp.tanh({x}), ({d},)) @1
    reduce_sum :: lax.reduce_sum({x}, ({d},)) / {n} @1
    reduce_sum :: lax.reduce_sum({x}, {v}) / 64 @1
    reduce_xor :: lax.reduce_xor({i}, ({d},)) @1
    sort :: lax.sort({x}, dimension={d}) @1
    sort :: lax.sort(({i}, {x}), dimension={d}, num_keys=2)[1] @1
    top_k :: lax.top_k({x}, 2, axis={d})[0] @1
"""
SHAPES = """
    broadcast_in_dim :: jnp.broadcast_to({x}, (4, *{s})) @0:4
    broadcast_in_dim :: jnp.broadcast_to(jnp.mean({x}), {s}) @1
    broadcast_in_dim :: lax.broadcast_in_dim(np.float32(0), {s}, ()) @1
    concatenate :: lax.concatenate([{x}, {y}], {d}) @1
    concatenate :: lax.concatenate([{x}, {y}, {z}], {d}) @1
    dynamic_slice :: lax.dynamic_slice_in_dim({x}, {i}.ravel()[0], {n} // 2, {d}) @1
    dynamic_update_slice :: lax.dynamic_update_slice_in_dim({x}, jnp.ones({w}), 1, {d})
        @1
    dynamic_update_slice :: lax.dynamic_update_slice_in_dim({x}, lax.slice_in_dim({y},
        0, 1, axis={d}), {i}.ravel()[0], {d}) @1
    pad :: lax.pad({x}, np.float32(0), [(int(i == {d}), 0, 0) for i in range({r})]) @1
    pad :: lax.pad({x}, jnp.mean({y}), [(int(i == {d}), 0, 0) for i in range({r})]) @1
    reshape :: lax.reshape({x}, {s} + (1,)) @0:4
    reshape :: {x}.reshape(-1) @2
    reshape :: {x}.reshape({s}[:-1] + (2, {s}[-1] // 2)) @1:4
    reshape :: lax.reshape({x}, {s}[::-1], range({r} - 1, -1, -1)) @2
    reshape :: lax.reshape({x}, ({n}, {x}.size // {n}), ({d}, *{v})) @3
    rev :: lax.rev({x}, ({d},)) @1
    slice :: lax.slice_in_dim({x}, 1, {n}, axis={d}) @1
    split :: lax.split({x}, (1, {n} - 1), axis={d})[1] @1
    squeeze :: lax.squeeze(lax.slice_in_dim({x}, 0, 1, axis={d}), ({d},)) @1
    stack :: jnp.stack([{x}, {y}], {d}) @1:4
    stack :: jnp.stack([{x}, {y}, {z}], {d}) @1:4
    tile :: jnp.tile({x}, [1 + (i == {d}) for i in range({r})]) @1
    tile :: jnp.tile({x}, 4) @1
    transpose :: jnp.moveaxis({x}, {d} - 1, {d}) @2
    transpose :: {x}.T @2
    unstack :: jnp.unstack({x}, axis={d})[1] @1
"""
INDEXING = """
    gather :: jnp.take({x}, {i}.ravel()[:8] % {n}, {d}, mode='clip') @1
    gather :: jnp.take({x}.ravel(), {i}, mode='fill', fill_value=0) @1
    gather :: jnp.take({x}, jnp.arange(8) - 1, {d}, mode='fill', fill_value=1) @1
    gather :: jnp.take_along_axis({x}, {i} % {n}, {d}) @1
    gather :: {x}[tuple({i}.ravel()[:4] % n for n in {s})] @1
    scatter :: {x}.at[{i}.ravel()[0]].set(jnp.mean({y})) @1
    scatter :: {x}.at[..., {i}.ravel()[0]].set(jnp.mean({y}, -1)) @1
    scatter :: {x}.at[{i}.ravel()[:4] % {s}[0]].set({y}[:4]) @1
    scatter :: {x}.ravel().at[{i}].set(jnp.sin({y})) @1
    scatter :: jax.vmap(lambda a, b: a.at[b.ravel()[:2]].set(a[:2]))({x}, {i}) @2
    scatter :: jax.vmap(lambda a, b: a.at[b.ravel()[0]].set(0.5))({x}, {i}) @2
    scatter :: jax.vmap(jax.vmap(lambda a, b: a.at[b.ravel()[0]].set(0.5)))({x}, {i})
        @3
"""
SCATTERS = """
    scatter-NAME :: {x}.at[{i}.ravel()[:4]].METHOD(0.5) @1
    scatter-NAME :: {x}.at[..., {i}.ravel()[:4]].METHOD(jnp.mean({y})) @1
    scatter-NAME :: {x}.at[:, {i}.ravel()[:4]].METHOD(jnp.mean({y})) @2
    scatter-NAME :: {x}.ravel().at[{i}].METHOD(jnp.sin({y})) @1
    scatter-NAME :: {x}.at[{i}.ravel()[:4] % {s}[0]].METHOD({y}[:4]) @1
    scatter-NAME :: jax.vmap(lambda a, b: a.at[b.ravel()[:2]].METHOD(0.5))({x}, {i}) @2
    scatter-NAME :: jax.vmap(jax.vmap(lambda a, b: a.at[b.ravel()[:2]].METHOD(0.5)))(
        {x}, {i}) @3
    scatter-NAME :: {x}.at[tuple({i}.ravel()[:4] % n for n in {s})].METHOD(0.5) @1
"""
_METHODS = {"add": "add", "sub": "subtract", "mul": "multiply", "max": "max"}
_METHODS["min"] = "min"
WINDOWS = """
    reduce_window :: lax.reduce_window({i}, np.int32(0), lax.bitwise_xor, {o},
        (1,) * {r}, 'SAME') @1
    reduce_window :: lax.reduce_window({x}, np.float32(1), lambda a, b: a * b + 0 * a,
        {o}, {o}, 'VALID') @1
    reduce_window_max :: lax.reduce_window({x}, -np.inf, lax.max, {o}, {o}, 'VALID') @1
    reduce_window_max :: lax.reduce_window({x}, -np.inf, lax.max,
        tuple(2 * n - 1 for n in {o}), {o}, 'SAME') @1
    reduce_window_min :: lax.reduce_window({x}, np.inf, lax.min, {o}, {o}, 'SAME') @1
    reduce_window_sum :: lax.reduce_window({x}, 0.0, lax.add, {o}, (1,) * {r}, 'SAME')
        @1
    select_and_gather_add :: jax.jvp(lambda a: lax.reduce_window(a, -np.inf, lax.max,
        {o}, {o}, 'VALID'), ({x},), ({y},))[1] @1
    select_and_scatter :: scattered_to_maxima({x}, lax.reduce_window({y}, 0.0, lax.add,
        {o}, {o}, 'VALID'), {o}) @1
    select_and_scatter_add :: jax.grad(lambda a: jnp.mean(jnp.sin(lax.reduce_window(a,
        -np.inf, lax.max, {o}, {o}, 'VALID'))))({x}) @1
    select_and_scatter_add :: jax.grad(lambda a: jnp.mean(jnp.sin(lax.reduce_window(a,
        -np.inf, lax.max, tuple(2 * n - 1 for n in {o}), {o}, 'SAME'))))({x}) @1
"""
KEYS = """
    random_bits :: jax.random.bits({k}, {s})
    random_bits :: jax.random.bits({k}, {s}, jnp.uint8)
    random_bits :: jax.vmap(lambda k: jax.random.bits(k, {s}))(jax.random.split({k}, 4))
        @0:4
    random_clone :: jax.random.bits(jax.random.clone({k}), {s})
    random_fold_in :: jax.random.uniform(jax.random.fold_in({k}, {i}.ravel()[0]), {s})
    random_gamma :: jax.random.gamma({k}, 1.5 + jnp.tanh({x}))
    random_seed :: jax.random.bits(jax.random.key({i}.ravel()[0]), {s})
    random_split :: jax.random.normal(jax.random.split({k}, 3)[1], {s})
    random_unwrap :: jax.random.key_data({k}) + {u}.ravel()[0]
    random_wrap :: jax.random.bits(jax.random.wrap_key_data({u}.ravel()[:2]), {s}) @1
    rng_bit_generator :: lax.rng_bit_generator(jnp.arange(4, dtype='uint32'), {s},
        jnp.uint32)[1]
    rng_uniform :: lax.rng_uniform(0.0, 1.0 + jnp.mean({x})**2, {s}) >= 0
"""
HOST = """
    debug_callback :: called_with({x})
    debug_print :: printed({x})
    io_callback :: jax.experimental.io_callback(np.sin, jax.typeof({x}), {x})
    io_callback :: jax.experimental.io_callback(np.logical_not, jax.typeof({p}), {p})
"""
MATRICES = """
    cholesky :: lax.linalg.cholesky(positive({x}))
    cholesky_update :: lax.linalg.cholesky_update(positive({x}), {y}[..., 0]) @2:2
    eig :: lax.linalg.eig(positive({x}), compute_left_eigenvectors=False)[0].real
    eigh :: lax.linalg.eigh(positive({x}))[1]
    fft :: jnp.fft.fft({x}, axis=-1).real / 4
    fft :: jnp.fft.rfft2({x}).imag / 16
    fft :: jnp.fft.irfft({c}, axis=-1)
    geqp3 :: jax.scipy.linalg.qr_multiply({x}, {y}, 'right', pivoting=True)[1]
    geqrf :: jnp.linalg.qr({x}, mode='raw')[0]
    hessenberg :: lax.linalg.hessenberg({x})[0]
    householder_product :: lax.linalg.householder_product({x}, {y}[..., 0])
    lu :: lax.linalg.lu({x})[0]
    lu_pivots_to_permutation :: lax.linalg.lu_pivots_to_permutation({i}[..., 0] % 4, 4)
    ormqr :: lax.linalg.ormqr({x}, {y}[..., 0], {z})
    qr :: lax.linalg.qr({x})[1]
    schur :: lax.linalg.schur({x})[0]
    svd :: lax.linalg.svd({x})[1]
    symmetric_product :: lax.linalg.symmetric_product({x}, positive({y}))
    triangular_solve :: lax.linalg.triangular_solve(positive({x}), {y}, left_side=True)
    triangular_solve :: lax.linalg.triangular_solve(positive({x}), {y}, lower=True)
    tridiagonal :: lax.linalg.tridiagonal(positive({x}))[1]
    tridiagonal_solve :: lax.linalg.tridiagonal_solve({x}[..., 0], 4 + {y}[..., 0]**2,
        {z}[..., 0], {z})
"""
PRODUCTS = """
    dot_general :: lax.dot_general({x}, {y}, ((({d},), ({d},)), ((), ()))) / {n} @1:3
    dot_general :: lax.dot_general({x}, {y}, (({v}, {v}), ((), ()))) / 64 @1
    dot_general :: lax.dot_general({x}, {y}, ((({d},), ({d},)), ({v}, {v}))) / {n} @1
    dot_general :: lax.dot_general({x}, {y}.ravel()[:4], (((), ()), ((), ()))) @0:4
    dot_general :: lax.dot_general({y}.ravel()[:4], {x}, (((), ()), ((), ()))) @0:4
    dot_general :: lax.dot_general({x}, {y}, ((range({r}),) * 2, ((), ()))) / 64 @1
    fuzz_product :: product_p.bind({x}, jnp.swapaxes({y}, 1, 2)) @3:3
    pallas_call:fuzz_double :: doubled({x}) @2:2
    ragged_dot_general :: lax.ragged_dot({x}, {y}[:4, None] + {x}[0, :, None],
        {i}[:4, 0]) @2:2
"""
# Shapes that end with these sizes: rows and columns; images; kernels.
CONVOLUTIONS = """
    conv_general_dilated :: lax.conv_general_dilated({x}, {y}[:4, :, :1, :2], (1, 1),
        'SAME') / 8
    conv_general_dilated :: lax.conv_general_dilated({x}, {y}[:4, :2, :2, :2], (2, 2),
        'VALID', feature_group_count=2) / 8
    conv_general_dilated :: lax.conv_general_dilated({x}, {y}[:4, :, :2, :2], (1, 1),
        'SAME', rhs_dilation=(2, 1), batch_group_count=2) / 8
    conv_general_dilated :: lax.conv_general_dilated({x}, {y}[:4, :, :2, :4], (2, 4),
        'VALID') / 32
    conv_general_dilated :: lax.conv_general_dilated({x}, {y}, (1, 1), ((1, 0), (0, 1)),
        lhs_dilation=(1, 2), rhs_dilation=(2, 1)) / 64
    conv_general_dilated :: jax.grad(lambda a, b: jnp.mean(jnp.sin(
        lax.conv_general_dilated(a, b, (2, 4), 'VALID'))), (0, 1))({x},
        {y}[:4, :, :2, :4])[{d} % 2]
    conv_general_dilated :: jax.grad(lambda a, b: jnp.mean(jnp.sin(
        lax.conv_general_dilated(a, b, (1, 1), 'SAME', feature_group_count=2))),
        (0, 1))({x}, {y}[:4, :2, :3, :3])[{d} % 2]
"""


def _lines(table: str) -> Iterator[tuple[str, str, str]]:
    """Primitive, text and ranks of every entry, of which some span lines."""
    for entry in table.replace("\n        ", " ").splitlines():
        if entry.strip():
            kind, rest = entry.strip().split(" :: ")
            text, _, ranks = rest.partition(" @")
            yield kind, text.strip(), ranks.strip()


def _read(table: str, **options: object) -> list[Recipe]:
    found = []
    for kind, text, ranks in _lines(table):
        recipe = replace(Recipe(kind, text), **options)  # type: ignore[arg-type]
        if ranks:
            least, _, most = ranks.partition(":")
            recipe = replace(recipe, least=int(least), most=int(most or 5))
        found.append(recipe)
    return found


def _by_name(names: str, text: str) -> str:
    return "\n".join(f"{n} :: {text.format(n)}" for n in names.split())


def _all() -> list[Recipe]:
    elements = "\n".join(
        (
            ELEMENTS,
            _by_name(_UNARY, "lax.{}({{x}})"),
            _by_name(_BOUNDED, "lax.{}(0.9 * jnp.tanh({{x}}))"),
            _by_name(_POSITIVE, "lax.{}(1.5 + jnp.tanh({{x}}))"),
            _by_name(_PAIRS, "lax.{}(0.5 + {{x}} * {{x}}, 1.5 + jnp.tanh({{y}}))"),
            _by_name(_BOUND, "primitives.{}_p.bind({{x}}, {{y}})"),
            _by_name(_INTEGER, "lax.{}({{i}})"),
        )
    )
    found = [*_read(elements), *_read(REDUCTIONS), *_read(SHAPES), *_read(INDEXING)]
    found += _read(_by_name(_ALONG, "lax.{}(0.3 * {{x}}, {{d}})"), least=1)
    for name, method in _METHODS.items():
        scatters = SCATTERS.replace("NAME", name).replace("METHOD", method)
        found += _read(scatters)
    found += [*_read(WINDOWS), *_read(KEYS), *_read(HOST), *_read(PRODUCTS)]
    found += _read(MATRICES, least=2, tail=(4, 4))
    return found + _read(CONVOLUTIONS, least=4, most=4, tail=(4, 4, 8))


RECIPES = tuple(_all())
