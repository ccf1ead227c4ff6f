"""Specs by choice: one shared value each, that says what the plain array says."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.clusters.cluster import Cluster
from autopar.costs.collectives import at_size
from autopar.costs.resharding import Resharder
from autopar.planner.spec_choices import SpecTable
from autopar.sharding.mesh import MeshShape
from autopar.sharding.spec import num_shards

MESH = MeshShape(("x", "y", "z"), (2, 2, 2))
arrays = st.lists(
    st.tuples(*[st.sampled_from([-1, 0, 1])] * 3), min_size=1, max_size=9
).map(np.array)


@settings(max_examples=30)
@given(arrays)
def test_every_choice_keeps_its_spec_and_fraction(specs: np.ndarray) -> None:
    choices = SpecTable(MESH.axis_sizes).choices(specs)
    for choice, spec in enumerate(specs.tolist()):
        assert choices.of(choice) == tuple(spec)
        assert choices.fractions[choice] == 1 / num_shards(spec, MESH.axis_sizes)
    assert len(set(choices.distinct)) == len(choices.distinct)


@settings(max_examples=30)
@given(arrays)
def test_equal_arrays_share_one_value(specs: np.ndarray) -> None:
    table = SpecTable(MESH.axis_sizes)
    assert table.choices(specs) is table.choices(specs.copy())


@settings(max_examples=30)
@given(st.lists(arrays, min_size=2, max_size=4))
def test_matrices_hold_the_cost_of_every_pair(many: list[np.ndarray]) -> None:
    resharder = Resharder(MESH, Cluster.preset("8xH100"))
    table = SpecTable(MESH.axis_sizes)
    for first, second in zip(many, many[1:], strict=False):
        sources, targets = table.choices(first).distinct, table.choices(second).distinct
        seconds = at_size(resharder.by_size(sources, targets), 1e6)
        for row, source in enumerate(sources):
            for column, target in enumerate(targets):
                found = seconds[row, column]
                assert found == resharder.seconds(source, target, 1e6)
