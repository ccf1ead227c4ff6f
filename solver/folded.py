"""Solving a graph of equal layers: few layers stand for all, and the bound for the full.

The short graph (`layers.py`) costs the same whatever the depth. Messages on it give
plans and a bound of the full graph; where these do not meet, nothing is lost but the
time, and the full graph is solved (`free.py`).
"""

from .layers import Layers, keep_few_layers
from .likely import improve_among_likely
from .messages import Passing
from .repeats import FEWEST_LAYERS, find_repeats
from .search import Search

FEWEST_NODES = 2000
ROUNDS_AT_ONCE = 10
MOST_ROUNDS = 60


def solve_folded(search: Search) -> None:
    """Looks for equal layers; raises the bound and offers plans of the full graph."""
    graph = search.graph
    if len(graph.nodes) < FEWEST_NODES:
        return
    repeats = find_repeats(graph, search.pool)
    if repeats is None or len(repeats.layers) < FEWEST_LAYERS:
        return
    layers = keep_few_layers(graph, repeats, search.pool)
    search.finish_phase("fold", layers.graph)
    _Folded(search, layers).run()


class _Folded:
    def __init__(self, search: Search, layers: Layers) -> None:
        self.search, self.layers = search, layers
        self.passing = Passing(layers.graph, order=layers.sweep_order())

    def run(self) -> None:
        search, passing = self.search, self.passing
        for _ in range(MOST_ROUNDS // ROUNDS_AT_ONCE):
            messages = passing.run(
                search.gap / 4,
                max_rounds=ROUNDS_AT_ONCE,
                time_limit_seconds=search.seconds_left / 4,
            )
            search.raise_bound(self.layers.bound(passing))
            if messages.choices is not None:
                self._offer(messages.choices)
            search.finish_phase("messages", self.layers.graph)
            if search.is_closed:
                return
            if messages.choices is not None:
                choices = improve_among_likely(
                    *(self.layers.graph, messages.choices, messages.marginals),
                    search.pool,
                    gap=search.gap / 4,
                    time_limit_seconds=1.0,
                )
                self._offer(choices)
                search.finish_phase("likely", self.layers.graph)
            if search.is_closed or messages.is_finished:
                return

    def _offer(self, choices: tuple[int, ...]) -> None:
        for source in range(len(self.layers.base)):
            self.search.offer(self.layers.expand(choices, source))
