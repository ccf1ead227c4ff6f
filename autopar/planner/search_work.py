"""What searches within a budget may take together: work counted over all meshes.

Work is counted, not timed (`solver/clock.py`), so that plans do not depend on the
machine. Of several meshes each may take half of what is left, so the first, the one
that others must beat, is searched longest. Where it took all of its half, no other is
begun: a later one has less, and has its problems and first plans to make, too. One axis
is no end, as a mesh that cuts it can do all that it can. A long step takes more than
half on a mesh of several axes, so there it may take all that is left.
"""

from __future__ import annotations

from autopar.solver.clock import Clock

from ..sharding.mesh import MeshShape

MOST_WORK = 90.0  # seconds, of all solutions on one mesh that is named
WORK_OF_MESHES = 60.0  # of all that are searched
GUARD_SECONDS = 1200.0
A_MESH, AFTER_ONE_AXIS = 0.5, 0.25  # of all, with which no other mesh is begun
AN_OPERATOR = 3e-4  # seconds of work to make the problem of one, with its first plans


class SearchWork:
    """Seconds of work on a clock that others may share, `most` at most from now on."""

    def __init__(self, most: float | None = None, clock: Clock | None = None) -> None:
        self.clock = clock or Clock(GUARD_SECONDS)
        self.most = MOST_WORK if most is None else most
        self.until = self.clock.spent + self.most

    @classmethod
    def of_meshes(cls) -> SearchWork:
        """What searches of several meshes may take together."""
        return cls(WORK_OF_MESHES)

    @property
    def left(self) -> float:
        """Seconds of work until the limit, at least 0."""
        return max(self.until - self.clock.now(), 0.0)

    def is_little(self, num_axes: int) -> bool:
        """Whether too little is left to begin a mesh after one that fits."""
        part = AFTER_ONE_AXIS if num_axes == 1 else A_MESH
        return self.left <= part * self.most

    def of_mesh(self, mesh: MeshShape, is_long: bool) -> SearchWork:
        """What a step, a long one or not, may take on one of several meshes."""
        return self if is_long and mesh.num_axes > 1 else self.half()

    def half(self) -> SearchWork:
        """Half of what is left, on the same clock."""
        return SearchWork(self.left / 2, self.clock)

    def spend_on_problem(self, num_operators: int) -> None:
        """Counts what it takes to begin a search of so many operators."""
        self.clock.spend(AN_OPERATOR * num_operators)

    def may_begin(self, num_operators: int) -> bool:
        """Whether more is left than the problem of so many operators takes."""
        return self.left > AN_OPERATOR * num_operators

    def give_up(self) -> None:
        """Counts what is left as spent, so that nothing else is tried with it."""
        self.clock.spend(self.left)

    def __str__(self) -> str:
        return f"SearchWork: {self.left:.3f} s left"
