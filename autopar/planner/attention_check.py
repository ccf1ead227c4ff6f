"""Whether a region of scores is a softmax and its gradient, tried on random numbers.

Region and definition are both rational functions of exponentials. In double precision
on a few hundred random numbers they agree to 1e-9 only if they are the same, but for a
chance that is as small (Schwartz 1980, Zippel 1979). Large scores are tried as well:
something may be cut off at a threshold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..rules.attention_spec import named, with_units, without_units
from ..rules.score_programs import Labels, Program
from .score_programs_of import ProgramBuilder
from .score_regions import NotAttention

_NUM_KEYS, _NUM_ROWS = 7, 3
_TOLERANCE = 1e-9
_TRIALS = ((1.0, 0.0), (1.0, 100.0), (1.0, -100.0), (100.0, 0.0))  # scale, offset
_SCALE = 2.5


def weights_of_softmax(
    builder: ProgramBuilder,
    softmax_input: int,
    weights: int,
    gradient: int | None,
    labels: Callable[[int], Labels],
    keys: int,
) -> tuple[int, int]:
    """A tensor of a region that is a softmax, and what it is of, laid out alike.

    Args:
      builder: of the region.
      softmax_input: what the softmax is taken of, in any layout.
      weights: what the values are multiplied with: linear in the softmax.
      gradient: that of the scores, if the region has one.
      labels: those of a tensor that has all dims of the scores.
      keys: the label of the dim that the softmax is over.

    Raises:
      NotAttention: there is none, or `gradient` is another gradient.
    """
    region, flow = builder.region, builder.flow
    steps, start = builder.all_steps(), region.first.results[0]
    seeds = region.seed.results if region.seed else ()
    sides = (*builder.sides_of(steps), *seeds)
    number = builder.numbers(steps, start, sides)
    order = labels(softmax_input)
    is_large = tuple(size > 1 for size in flow.types[start].shape)
    made = (tensor for op in steps for tensor in op.results)
    candidates = [
        tensor
        for tensor in (start, *made)
        if tensor not in region.of_seed
        and sorted(named(builder.labels_of(tensor))) == sorted(named(order))
    ]
    given = (*sides, start)
    layouts = () if gradient is None else (*seeds, weights, gradient, start)
    found = _softmax_and_gradient(
        builder.program(steps, start, weights, sides),
        number[softmax_input],
        tuple(number[t] for t in candidates),
        None if gradient is None else number[gradient],
        tuple(builder.labels_of(t) for t in given),
        tuple(labels(t) for t in layouts),
        tuple(flow.types[t].dtype.name for t in given),
        is_large,
        keys,
        (order, *(builder.labels_of(t) for t in candidates)),
    )
    if isinstance(found, str):
        raise NotAttention(found)
    softmax, alike = candidates[found[0]], candidates[found[1]]
    after = builder.steps(softmax, weights)
    sides = builder.sides_of(after)
    if not _is_linear(
        builder.program(after, softmax, weights, sides),
        builder.labels_of(softmax),
        tuple(builder.labels_of(t) for t in sides),
        tuple(flow.types[t].dtype.name for t in sides),
        is_large,
    ):
        raise NotAttention("its weights are not linear in their softmax")
    return softmax, alike


@lru_cache(maxsize=256)
def _softmax_and_gradient(
    program: Program,
    softmax_input: int,
    candidates: tuple[int, ...],
    gradient: int | None,
    shapes: tuple[Labels, ...],
    layouts: tuple[Labels, ...],
    dtypes: tuple[str, ...],
    is_large: tuple[bool, ...],
    keys: int,
    orders: tuple[Labels, ...],
) -> tuple[int, int] | str:
    """Which of `candidates` is the softmax and which its input, or what is amiss.

    `orders` are the labels of the input that is known, and of the candidates.

    The program's last side is the cotangent of its result if it has a `gradient`;
    `layouts` are the labels of that side, the result, the gradient and the scores.
    """
    sizes = {
        label: (_NUM_KEYS if label == keys else _NUM_ROWS) if large else 1
        for label, large in enumerate(is_large)
    }
    random = np.random.default_rng(0)
    own, *others = orders
    alike: tuple[int, int] | None = None
    with jax.enable_x64(True):
        for scale, offset in _TRIALS:
            values = [
                _random_side(random, labels, dtype, sizes)
                for labels, dtype in zip(shapes, dtypes, strict=True)
            ]
            sides = values[: program.num_sides]
            scores = offset + scale * values[program.num_sides]

            def run(scores: Any, sides: Any = sides) -> list[Any]:
                return program.values(scores, sides, sizes, is_exact=True)

            made = run(scores)
            x = made[softmax_input]
            softmax = jax.nn.softmax(x, axis=x.shape.index(_NUM_KEYS))

            def has(
                i: int, wanted: Any, layouts: Sequence[Labels], made: Any = made
            ) -> bool:
                """Whether a candidate has these values, in one of the layouts."""
                return others[i] in layouts and _is_close(
                    made[candidates[i]], _laid_out(wanted, own, others[i])
                )

            every = range(len(candidates))
            if alike is None:
                found = next((i for i in every if has(i, softmax, others)), None)
                if found is None:
                    return "its weights are no softmax"
                layout = [others[found]]
                given = next((i for i in every if has(i, x, layout)), None)
                if given is None:
                    return "its softmax is laid out unlike its scores"
                alike = found, given
            elif not (has(alike[0], softmax, others) and has(alike[1], x, others)):
                return "its weights are no softmax of large scores"
            if gradient is not None:
                _, back = jax.vjp(lambda x: run(x)[program.result], scores)
                (expected,) = back(_laid_out(sides[-1], *layouts[:2]))
                made_back = _laid_out(made[gradient], *layouts[2:])
                # where a softmax is nearly 0 or 1, gradients are rounding
                least = float(abs(sides[-1]).max()) if scale > 1 or offset else 0.0
                if not _is_close(made_back, expected, least):
                    return "what comes back is not the gradient of its scores"
    assert alike is not None
    return alike


@lru_cache(maxsize=256)
def _is_linear(
    program: Program,
    labels: Labels,
    side_labels: tuple[Labels, ...],
    dtypes: tuple[str, ...],
    is_large: tuple[bool, ...],
) -> bool:
    """Whether a program is linear in what it is given first, with dims `labels`."""
    sizes = {label: _NUM_ROWS if large else 1 for label, large in enumerate(is_large)}
    random = np.random.default_rng(1)
    with jax.enable_x64(True):
        x, y = (_random_side(random, labels, "float64", sizes) for _ in range(2))
        sides = [
            _random_side(random, each, dtype, sizes)
            for each, dtype in zip(side_labels, dtypes, strict=True)
        ]

        def run(x: Any) -> Any:
            return program.values(x, sides, sizes, is_exact=True)[program.result]

        return _is_close(run(x + _SCALE * y), run(x) + _SCALE * run(y))


def _random_side(
    random: np.random.Generator, labels: Labels, dtype: str, sizes: Mapping[int, int]
) -> Any:
    shape = tuple(1 if label is None else sizes[label] for label in labels)
    if dtype == "bool":
        return jnp.asarray(random.random(shape) < 0.7)
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.asarray(random.integers(0, 3, shape), dtype)
    return jnp.asarray(random.normal(size=shape), jnp.float64)


def _laid_out(x: Any, labels: Labels, wanted: Labels) -> Any:
    order = [named(labels).index(label) for label in named(wanted)]
    return with_units(jnp.transpose(without_units(x, labels), order), wanted)


def _is_close(x: Any, y: Any, least_scale: float = 0.0) -> bool:
    if x.shape != y.shape:
        return False
    finite = np.where(np.isfinite(y), y, 0.0)
    scale = np.abs(finite).max(initial=max(least_scale, 1e-30))
    return bool(np.allclose(x, y, rtol=_TOLERANCE, atol=_TOLERANCE * scale))
