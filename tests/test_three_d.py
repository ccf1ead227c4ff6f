"""`ThreeD` by its sizes: one stage is Megatron's tensor parallelism."""

import pytest

import autopar
from tests.rows.fixtures import f3
from tests.rows.running import run_as_planned, traffic


def test_three_d_of_one_stage_is_megatron_by_its_sizes() -> None:
    case = f3()
    step = autopar.parallelize(case.step, method=autopar.ThreeD(data=2, tensor=4))
    found = run_as_planned(step, *case.args).plan
    megatron = autopar.parallelize(case.step, method=autopar.Megatron(tensor=4))
    assert str(found.sharding.mesh) == "data:2;tensor:4"
    assert traffic(found) == traffic(megatron.plan(*case.args))


def test_three_d_refuses_other_sizes_and_stages() -> None:
    case = f3()
    step = autopar.parallelize(case.step, method=autopar.ThreeD(data=2, tensor=2))
    with pytest.raises(ValueError, match="`data` times `tensor` must be .* has 8"):
        step.plan(*case.args)
    with pytest.raises(ValueError, match="`data` must be .* but got 0"):
        autopar.ThreeD(data=0, tensor=4)
    with pytest.raises(NotImplementedError, match="PipelineParallel.num_stages=2"):
        autopar.ThreeD(data=2, tensor=2, pipeline=2)
