"""Kernels on class matrices: pure functions of arrays, in min-plus algebra.

Notation: `costs` [k] of a node, `classes` [k] in [0, R), `matrix` [R, S] of an edge
seen from the node; inf is forbidden. Two values closer than QUANTUM times the largest
finite entry count as equal, and the error that this makes is returned as `deviation`.
"""

from math import inf

import numpy as np

QUANTUM = 1e-13
MOST_ENTRIES_AT_ONCE = 1 << 18
MOST_ENTRIES_IN_CACHE = 1 << 14


def both_ends(
    row_class: np.ndarray,
    column_class: np.ndarray,
    classes: np.ndarray,
    classes2: np.ndarray,
    matrix: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Classes at both ends after rows and columns merged, and the matrix transposed."""
    return row_class[classes], column_class[classes2], np.ascontiguousarray(matrix.T)


def normalise(
    matrix: np.ndarray,
) -> tuple[
    np.ndarray,
    np.ndarray,
    np.ndarray | None,
    np.ndarray | None,
    np.ndarray | None,
    float,
]:
    """Moves row and column minima out of a matrix and merges equal rows and columns.

    Returns (row class [R], column class [S], smaller matrix, row costs [R], column
    costs [S], deviation); None stands for a matrix or costs of zeros. Row costs are inf
    where a whole row is forbidden.
    """
    largest, row_costs = matrix.max(), matrix.min(axis=1)
    if largest < inf:
        rest = matrix - row_costs[:, None]
        column_costs = rest.min(axis=0)
        rest -= column_costs
    else:
        rest = matrix - np.where(row_costs < inf, row_costs, 0.0)[:, None]
        rest[row_costs == inf] = 0.0
        column_costs = rest.min(axis=0)
        rest -= np.where(column_costs < inf, column_costs, 0.0)
        rest[:, column_costs == inf] = 0.0
        largest = np.max(matrix, where=matrix < inf, initial=0.0)
    row_class, column_class, small, deviation = _merged(rest, largest)
    return (
        row_class,
        column_class,
        small if small.size > 1 else None,
        row_costs if row_costs.any() else None,
        column_costs if column_costs.any() else None,
        deviation,
    )


def _merged(
    rest: np.ndarray, largest: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Without equal rows and columns: (row class, column class, matrix, deviation).

    `largest` is the finite entry that rounding is relative to.
    """
    if not rest.any():
        rows, columns = (np.zeros(size, np.intp) for size in rest.shape)
        return rows, columns, rest[:1, :1], 0.0
    quantum = QUANTUM * max(largest, 1e-280)
    finite = rest < inf
    is_finite = bool(finite.all())
    keys = np.round((rest if is_finite else np.where(finite, rest, 0.0)) / quantum)
    if not is_finite:
        keys[~finite] = -1.0
    rows, row_class = _distinct(keys)
    if len(rows) < len(keys):
        keys = keys[rows]
    columns, column_class = _distinct(np.ascontiguousarray(keys.T))
    if (len(rows), len(columns)) == rest.shape:
        return row_class, column_class, rest, 0.0
    small = rest[rows][:, columns]
    merged = small[row_class][:, column_class]
    if is_finite:
        difference = rest - merged
    else:
        difference = np.subtract(rest, merged, where=finite, out=np.zeros_like(rest))
    return row_class, column_class, small, np.abs(difference).max()


def restrict(
    classes: np.ndarray, matrix: np.ndarray, kept: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Classes and matrix of an edge after the node kept only some choices."""
    used, renamed = _in_use(classes[kept], len(matrix))
    return renamed, matrix if used.size == len(matrix) else matrix[used]


def used_only(
    classes: np.ndarray, classes2: np.ndarray, matrix: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Classes of both ends and the matrix, without classes that have no choice."""
    used, renamed = _in_use(classes, matrix.shape[0])
    used2, renamed2 = _in_use(classes2, matrix.shape[1])
    return renamed, renamed2, matrix[used][:, used2]


def _in_use(classes: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The classes of `count` that have a choice, and each choice's among them."""
    is_used = np.zeros(count, bool)
    is_used[classes] = True
    return np.flatnonzero(is_used), (np.cumsum(is_used) - 1)[classes]


def merge_parallel(
    classes: np.ndarray,
    other_classes: np.ndarray,
    matrix: np.ndarray,
    classes2: np.ndarray,
    other_classes2: np.ndarray,
    matrix2: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two edges between the same nodes as one (classes, other classes, matrix)."""
    rows2, columns2 = matrix2.shape
    pairs, merged = _in_use(classes * rows2 + classes2, len(matrix) * rows2)
    others, other_merged = _in_use(
        other_classes * columns2 + other_classes2, matrix.shape[1] * columns2
    )
    left = matrix[pairs // rows2][:, others // columns2]
    return merged, other_merged, left + matrix2[pairs % rows2][:, others % columns2]


def _step(size: int) -> int:
    """How many arrays of a size to work on at once."""
    return max(MOST_ENTRIES_IN_CACHE // size, 1)


def undominated(costs: np.ndarray, *edges: np.ndarray) -> tuple[np.ndarray, float]:
    """Choices of a node to keep, and the most that dropping the rest can lose.

    A choice goes when another one costs no more whatever the neighbours choose
    (Goldstein's criterion for dead-end elimination, 1994). `edges` are (classes,
    matrix) of each edge of the node, flattened. Most pairs of choices are told apart by
    the one column where the first is cheapest; only what the rest can cost is worked
    out.
    """
    least = costs[None, :] - costs[:, None]
    pairs = list(zip(edges[::2], edges[1::2], strict=True))
    for classes, matrix in pairs:
        least += _cost_at_cheapest(matrix)[classes][:, classes]
    np.fill_diagonal(least, inf)
    first, second = np.nonzero(least <= QUANTUM * np.max(costs))
    total = costs[second] - costs[first]
    for classes, matrix in pairs:
        total += _most_between(matrix, classes[first], classes[second])
    excess = np.full((costs.size, costs.size), inf)
    excess[first, second] = total
    return _drop(costs, excess)


def _cost_at_cheapest(matrix: np.ndarray) -> np.ndarray:
    """[R, R] what row b costs more than row a in the column where a is cheapest."""
    columns = matrix.argmin(axis=1)
    least = matrix[np.arange(len(matrix)), columns]
    return matrix[:, columns].T - np.where(least < inf, least, 0.0)[:, None]


def _most_between(
    matrix: np.ndarray, rows: np.ndarray, others: np.ndarray
) -> np.ndarray:
    """The most, over columns, that a row of `others` costs more than that of `rows`."""
    result = np.empty(rows.size)
    step = max(MOST_ENTRIES_AT_ONCE // matrix.shape[1], 1)
    with np.errstate(invalid="ignore"):
        for start in range(0, rows.size, step):
            some = slice(start, start + step)
            difference = matrix[others[some]] - matrix[rows[some]]
            np.fmax.reduce(difference, axis=1, out=result[some], initial=-inf)
    return result


def _drop(costs: np.ndarray, excess: np.ndarray) -> tuple[np.ndarray, float]:
    """The same, of [k, k] the most that it can cost to use choice b in place of a."""
    lost, tolerance = 0.0, QUANTUM * costs.max()
    candidates = np.flatnonzero((excess <= tolerance).any(axis=1))
    if not candidates.size:
        return np.arange(costs.size), lost
    is_alive = np.ones(costs.size, bool)
    for choice in candidates[np.argsort(-costs[candidates], kind="stable")]:
        least = np.min(excess[choice], where=is_alive, initial=inf)
        if least <= tolerance:
            is_alive[choice] = False
            lost += max(least, 0.0)
    return np.flatnonzero(is_alive), lost


def fold_leaf(costs: np.ndarray, classes: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """A node with one edge, minimised out: costs [S] by class of the neighbour."""
    return (matrix + _cheapest(costs, classes, len(matrix))[:, None]).min(axis=0)


def fold_pair(
    costs: np.ndarray,
    classes: np.ndarray,
    matrix: np.ndarray,
    classes2: np.ndarray,
    matrix2: np.ndarray,
) -> np.ndarray:
    """A node with two edges, minimised out: [S, S2] costs between its neighbours."""
    rows2 = len(matrix2)
    least = _cheapest(costs, classes * rows2 + classes2, len(matrix) * rows2)
    pairs = np.flatnonzero(least < inf)
    left = matrix[pairs // rows2] + least[pairs][:, None]
    right = matrix2[pairs % rows2]
    shape = matrix.shape[1], matrix2.shape[1]
    if shape[0] * shape[1] * pairs.size <= MOST_ENTRIES_IN_CACHE:
        return np.min(left[:, :, None] + right[:, None, :], axis=0, initial=inf)
    best, step = np.full(shape, inf), _step(shape[1])
    for start in range(0, len(best), step):
        some = slice(start, start + step)
        total = np.empty_like(best[some])
        for column, row in zip(left[:, some], right, strict=True):
            np.add(column[:, None], row, out=total)
            np.minimum(best[some], total, out=best[some])
    return best


def _cheapest(costs: np.ndarray, classes: np.ndarray, count: int) -> np.ndarray:
    """[count] the least cost of a choice in each class, inf where there is none."""
    least = np.full(count, inf)
    np.minimum.at(least, classes, costs)
    return least


def _distinct(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Representative rows in order of appearance, and each row's representative."""
    number: dict[bytes, int] = {}
    data, size = keys.tobytes(), keys.itemsize * keys.shape[1]
    classes, rows = [], []
    for row, start in enumerate(range(0, len(data), size)):
        key = data[start : start + size]
        found = number.setdefault(key, len(rows))
        if found == len(rows):
            rows.append(row)
        classes.append(found)
    return np.array(rows, np.intp), np.array(classes, np.intp)
