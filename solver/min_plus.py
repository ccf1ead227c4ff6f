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


def add(costs: np.ndarray, class_costs: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Costs of a node after costs on its classes moved into it."""
    return costs + class_costs[classes]


def both_ends(
    row_class: np.ndarray,
    column_class: np.ndarray,
    classes: np.ndarray,
    classes2: np.ndarray,
    matrix: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Classes at both ends after rows and columns merged, and the matrix transposed."""
    return row_class[classes], column_class[classes2], np.ascontiguousarray(matrix.T)


def take(array: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """The kept entries."""
    return array[kept]


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
    row_costs = matrix.min(axis=1)
    rest = matrix - np.where(row_costs < inf, row_costs, 0.0)[:, None]
    rest[row_costs == inf] = 0.0
    column_costs = rest.min(axis=0)
    rest = rest - np.where(column_costs < inf, column_costs, 0.0)[None, :]
    rest[:, column_costs == inf] = 0.0
    finite = np.isfinite(rest)
    largest = np.max(matrix, where=np.isfinite(matrix), initial=0.0)
    quantum = QUANTUM * max(largest, 1e-280)
    keys = np.where(finite, np.round(np.where(finite, rest, 0.0) / quantum), -1.0)
    rows, row_class = _distinct(keys)
    columns, column_class = _distinct(np.ascontiguousarray(keys[rows].T))
    small = rest[rows][:, columns]
    merged = small[row_class][:, column_class]
    difference = np.subtract(rest, merged, where=finite, out=np.zeros_like(rest))
    deviation = np.abs(difference).max()
    return (
        row_class,
        column_class,
        small if small.size > 1 else None,
        row_costs if row_costs.any() else None,
        column_costs if column_costs.any() else None,
        deviation,
    )


def restrict(
    classes: np.ndarray, matrix: np.ndarray, kept: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Classes and matrix of an edge after the node kept only some choices."""
    used, renamed = np.unique(classes[kept], return_inverse=True)
    return renamed.astype(np.intp), matrix if used.size == len(matrix) else matrix[used]


def used_only(
    classes: np.ndarray, classes2: np.ndarray, matrix: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Classes of both ends and the matrix, without classes that have no choice."""
    used, renamed = np.unique(classes, return_inverse=True)
    used2, renamed2 = np.unique(classes2, return_inverse=True)
    smaller = matrix[used][:, used2]
    return renamed.astype(np.intp), renamed2.astype(np.intp), smaller


def merge_parallel(
    classes: np.ndarray,
    other_classes: np.ndarray,
    matrix: np.ndarray,
    classes2: np.ndarray,
    other_classes2: np.ndarray,
    matrix2: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two edges between the same nodes as one (classes, other classes, matrix)."""
    pairs, merged = np.unique(classes * len(matrix2) + classes2, return_inverse=True)
    width = matrix2.shape[1]
    other_pairs, other_merged = np.unique(
        other_classes * width + other_classes2, return_inverse=True
    )
    rows, rows2 = np.divmod(pairs, len(matrix2))
    columns, columns2 = np.divmod(other_pairs, width)
    total = matrix[rows][:, columns] + matrix2[rows2][:, columns2]
    return merged.astype(np.intp), other_merged.astype(np.intp), total


def replacement_costs(matrix: np.ndarray) -> np.ndarray:
    """[R, R]: the most it can cost, over columns, to use row b in place of row a.

    Columns that row a forbids do not count: there it could not have been used.
    """
    result = np.empty((len(matrix), len(matrix)))
    columns = np.ascontiguousarray(matrix.T)
    difference = np.empty_like(columns)
    most = np.maximum if np.isfinite(matrix).all() else np.fmax  # fmax passes over nan
    with np.errstate(invalid="ignore"):
        for row, entries in enumerate(matrix):
            np.subtract(columns, entries[:, None], out=difference)
            most.reduce(difference, axis=0, out=result[row], initial=-inf)
    return result


def undominated(
    costs: np.ndarray, held: np.ndarray | None, *edges: np.ndarray
) -> tuple[np.ndarray, float, np.ndarray]:
    """Choices of a node to keep, the most that dropping the rest can lose, and
    [dropped, kept] the most it can cost to use a kept choice in place of a dropped one.

    A choice goes when another one costs no more whatever the neighbours choose
    (Goldstein's criterion for dead-end elimination, 1994) and holds no more bytes.
    `edges` are (classes, replacement costs) of each edge of the node, flattened.
    """
    replacement = costs[None, :] - costs[:, None]
    for classes, by_class in zip(edges[::2], edges[1::2], strict=True):
        replacement = replacement + by_class[classes][:, classes]
    return _drop(costs, held, replacement)


def undominated_of_many(
    costs: np.ndarray, held: np.ndarray | None, *edges: np.ndarray
) -> tuple[np.ndarray, float, np.ndarray]:
    """The same for a node of many choices, `edges` being (classes, matrix) of each.

    Most pairs of choices are told apart by the one column where the first is cheapest;
    only what the rest can cost is worked out (inf stands for what was not).
    """
    least = costs[None, :] - costs[:, None]
    pairs = list(zip(edges[::2], edges[1::2], strict=True))
    for classes, matrix in pairs:
        least += _cost_at_cheapest(matrix)[classes][:, classes]
    if held is not None:
        least[held[None, :] > held[:, None]] = inf
    np.fill_diagonal(least, inf)
    first, second = np.nonzero(least <= QUANTUM * np.max(costs))
    total = costs[second] - costs[first]
    for classes, matrix in pairs:
        total += _most_between(matrix, classes[first], classes[second])
    replacement = np.full((costs.size, costs.size), inf)
    replacement[first, second] = total
    return _drop(costs, held, replacement)


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


def _drop(
    costs: np.ndarray, held: np.ndarray | None, replacement: np.ndarray
) -> tuple[np.ndarray, float, np.ndarray]:
    excess = replacement.copy()
    if held is not None:
        excess[held[None, :] > held[:, None]] = inf
    np.fill_diagonal(excess, inf)
    tolerance = QUANTUM * np.max(costs)
    is_alive, lost = np.ones(costs.size, bool), 0.0
    candidates = np.flatnonzero((excess <= tolerance).any(axis=1))
    for choice in candidates[np.argsort(-costs[candidates], kind="stable")]:
        least = np.min(excess[choice], where=is_alive, initial=inf)
        if least <= tolerance:
            is_alive[choice] = False
            lost += max(least, 0.0)
    return np.flatnonzero(is_alive), lost, replacement[~is_alive][:, is_alive]


def fold_leaf(costs: np.ndarray, classes: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """A node with one edge, minimised out: costs [S] by class of the neighbour."""
    _, choices = _cheapest(costs, classes)
    return (matrix + costs[choices][:, None]).min(axis=0)


def fold_pair(
    costs: np.ndarray,
    classes: np.ndarray,
    matrix: np.ndarray,
    classes2: np.ndarray,
    matrix2: np.ndarray,
) -> np.ndarray:
    """A node with two edges, minimised out: [S, S2] costs between its neighbours."""
    pairs, choices = _cheapest(costs, classes * len(matrix2) + classes2)
    rows, rows2 = np.divmod(pairs, len(matrix2))
    left = matrix[rows] + costs[choices][:, None]
    right = matrix2[rows2]
    best = np.full((matrix.shape[1], matrix2.shape[1]), inf)
    step = max(MOST_ENTRIES_IN_CACHE // matrix2.shape[1], 1)
    for start in range(0, len(best), step):
        some = slice(start, start + step)
        total = np.empty_like(best[some])
        for column, row in zip(left[:, some], right, strict=True):
            np.add(column[:, None], row, out=total)
            np.minimum(best[some], total, out=best[some])
    return best


def _cheapest(costs: np.ndarray, classes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The classes in use and the cheapest choice in each."""
    order = np.lexsort((costs, classes))
    used, first = np.unique(classes[order], return_index=True)
    return used, order[first]


def _distinct(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Representative rows in order of appearance, and each row's representative."""
    found: dict[bytes, int] = {}
    classes = np.array([found.setdefault(row.tobytes(), len(found)) for row in keys])
    _, rows = np.unique(classes, return_index=True)
    return rows, classes
