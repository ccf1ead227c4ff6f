"""`ThreeD` by its sizes: one stage is Megatron's tensor parallelism."""

import pytest

import autopar
from tests.rows.fixtures import f1
from tests.rows.running import traffic


def test_three_d_of_one_stage_is_megatron_by_its_sizes() -> None:
    case = f1()
    step = autopar.parallelize(case.step, method=autopar.ThreeD(data=2, tensor=4))
    found = step.plan(*case.args)
    megatron = autopar.parallelize(case.step, method=autopar.Megatron(tensor=4))
    assert str(found.sharding.mesh) == "data:2;tensor:4"
    assert traffic(found) == traffic(megatron.plan(*case.args))


def test_three_d_refuses_other_sizes() -> None:
    case = f1(batch=4)
    for method, text in (
        (autopar.ThreeD(data=2, tensor=2), "`data` times `tensor` must be .* has 8"),
        (autopar.ThreeD(2, 1, pipeline=2), "times `pipeline` must be .* have 8"),
        (autopar.ThreeD(4, 1, pipeline=2, num_microbatches=2), "4 parts"),
    ):
        with pytest.raises(ValueError, match=text):
            autopar.parallelize(case.step, method=method).plan(*case.args)
    with pytest.raises(ValueError, match="`data` must be .* but got 0"):
        autopar.ThreeD(data=0, tensor=4)
