"""Names what a compiler did to the planned collectives of one kind and group.

widen             a narrow type is sent as a wider one (bfloat16 as float32 on CPU)
narrow            a value is moved before it is converted to a wider type; it is
                  reduced so only for TPUs, where what products read is rounded anyway
combine           pieces of a type sent as one; what is equal may go before
hoist             moved out of a loop, so it runs less often
dedup             an equal collective stays: equal operands, or sums added first
sum               a small gather or reduce-scatter is written as an all-reduce
again             made once more rather than kept; one that is not is there, too
constant or dead  gone without a trace: its value is known, or nobody reads it
fold              sums over one group, then another, sent as one (see `folds.py`)

Nothing else is explained: pieces of another type, or smaller ones, are wrong.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from autopar.sharding.collective import Collective

# Dtype and bytes of one execution; counted by executions a step.
Piece = tuple[str, int]


@dataclass(frozen=True)
class Comparison:
    """What was found; `is_allowed` says whether a plan still bounds the program."""

    rewrites: tuple[str, ...]
    is_allowed: bool

    def __str__(self) -> str:
        return "; ".join(self.rewrites)


def compare(
    planned: Sequence[Collective],
    compiled: Sequence[Collective],
    rewrites: Iterable[str] = (),
) -> Comparison:
    """Compares collectives of one kind, reduction and group with a compiled program's.

    Args:
      planned: all that the plan has, or the lowered program where it equals the plan.
      compiled: all that the compiled program has.
      rewrites: the names of those that `planned` went through already.
    """
    if _has_unknown_loop(compiled) and not _has_unknown_loop(planned):
        return Comparison(("in a loop of unknown trip count",), False)
    wanted = executions(planned)
    firsts = executions(each for each in compiled if not each.is_again)
    again = executions(
        each
        for each in compiled
        if each.is_again and (each.dtype, each.bytes) in firsts
    )
    seen, narrowed = _narrow(wanted, executions(compiled) - again)
    rewrites = [*rewrites, *([f"again: {in_words(again)}"] if again else ())]
    for ((dtype, num_bytes), wide), times in narrowed.items():
        rewrites.append(f"widen: {times} x {num_bytes:,} B {dtype} sent as {wide}")
    if summed := executions(each for each in compiled if each.by_all_reduce):
        rewrites.append(f"sum: {in_words(summed)} by all_reduce")
    gone, new = wanted - seen, seen - wanted
    if total(seen) > total(wanted):
        return Comparison((*rewrites, "more bytes than planned"), False)
    if all(each.may_round or not each.reduction for each in compiled):
        for (wide, narrow), times in _converted(gone, new, _is_narrower).items():
            gone[wide] -= times
            new[narrow] -= times
            text = f"{times} x {wide[1]:,} B {wide[0]} sent as {narrow[0]}"
            rewrites.append(f"narrow: {text}")
        gone, new = +gone, +new
    if new:
        if not _are_combined(new, gone):
            return Comparison((*rewrites, f"not planned: {in_words(new)}"), False)
        less = "same" if total(seen) == total(wanted) else "fewer"
        rewrites.append(
            f"combine: {less} bytes in {seen.total()} pieces, not {wanted.total()}"
        )
        return Comparison(tuple(rewrites), True)
    for piece in sorted(gone):
        is_fewer_operations = _num_operations(compiled, piece) < _num_operations(
            planned, piece
        )
        text = f"{gone[piece]} of {wanted[piece]} x {piece[1]:,} B {piece[0]} gone"
        if piece not in seen:
            rewrites.append(f"constant or dead: {text}")
        else:
            rewrites.append(f"{'dedup' if is_fewer_operations else 'hoist'}: {text}")
    return Comparison(tuple(rewrites), True)


def executions(collectives: Iterable[Collective]) -> Counter[Piece]:
    """Counts executions a step by dtype and bytes."""
    counts: Counter[Piece] = Counter()
    for each in collectives:
        counts[each.dtype, each.bytes] += each.count
    return counts


def _narrow(
    wanted: Counter[Piece], seen: Counter[Piece]
) -> tuple[Counter[Piece], Counter[tuple[Piece, str]]]:
    """Undoes widening: says in planned types what was sent in wider ones."""
    narrowed: Counter[tuple[Piece, str]] = Counter()
    missing, extra, seen = wanted - seen, seen - wanted, Counter(seen)
    for (narrow, wide), times in _converted(missing, extra, _is_widened).items():
        seen[wide] -= times
        seen[narrow] += times
        narrowed[narrow, wide[0]] += times
    return +seen, narrowed


def _converted(
    missing: Counter[Piece],
    extra: Counter[Piece],
    is_pair: Callable[[Piece, Piece], bool],
) -> Counter[tuple[Piece, Piece]]:
    """How many missing pieces are there as extra ones of another type."""
    found: Counter[tuple[Piece, Piece]] = Counter()
    missing, extra = Counter(missing), Counter(extra)
    for other in sorted(extra):
        for piece in sorted(missing):
            times = min(extra[other], missing[piece])
            if times and is_pair(piece, other):
                extra[other] -= times
                missing[piece] -= times
                found[piece, other] = times
    return found


def _is_widened(narrow: Piece, wide: Piece) -> bool:
    narrow_type, wide_type = jnp.dtype(narrow[0]), jnp.dtype(wide[0])
    is_same_class = any(
        jnp.issubdtype(narrow_type, family) and jnp.issubdtype(wide_type, family)
        for family in (jnp.floating, jnp.signedinteger, jnp.unsignedinteger)
    )
    is_wider = wide_type.itemsize > narrow_type.itemsize
    return (
        is_same_class
        and is_wider
        and narrow[1] * wide_type.itemsize == wide[1] * narrow_type.itemsize
    )


def _num_operations(collectives: Iterable[Collective], piece: Piece) -> int:
    return sum((each.dtype, each.bytes) == piece for each in collectives)


def _is_narrower(wide: Piece, narrow: Piece) -> bool:
    """Whether a piece has as many elements, of a type of fewer bytes."""
    wide_size, narrow_size = (jnp.dtype(each[0]).itemsize for each in (wide, narrow))
    is_same_length = narrow[1] * wide_size == wide[1] * narrow_size
    return narrow_size < wide_size and is_same_length


def _are_combined(new: Counter[Piece], gone: Counter[Piece]) -> bool:
    """Whether pieces may be others joined: none smaller, no more bytes of a type."""
    for dtype in {dtype for dtype, _ in new}:
        made = Counter({p: n for p, n in new.items() if p[0] == dtype})
        lost = Counter({p: n for p, n in gone.items() if p[0] == dtype})
        if not lost or total(made) > total(lost) or min(made) < min(lost):
            return False
    return True


def in_words(pieces: Counter[Piece]) -> str:
    """Executions a step of each piece; `none` if there is none."""
    words = [f"{n} x {size:,} B {dtype}" for (dtype, size), n in sorted(pieces.items())]
    return " + ".join(words) or "none"


def total(pieces: Counter[Piece]) -> int:
    return sum(num_bytes * times for (_, num_bytes), times in pieces.items())


def _has_unknown_loop(collectives: Iterable[Collective]) -> bool:
    return any(each.unbounded for each in collectives)
