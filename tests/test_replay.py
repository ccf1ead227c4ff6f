"""Replayed programs: what kernels move and multiply, what is sent beside them."""

import pytest

from autopar.audit.replay import replay
from autopar.clusters.cluster import Cluster
from autopar.clusters.hardware import Device, Link
from autopar.costs.collectives import collective_seconds
from autopar.sharding.mesh import parse_mesh

DEVICE = Device("H100", 10**9, {"float32": 1e12, "bfloat16": 2e12}, 1e9)
LINK = Link("wire", 1e-6, 1e8)
CLUSTER = Cluster("test", 1, 4, DEVICE, LINK, LINK, 1e-5, 1e-7, "made up")
MESH = parse_mesh("x:4")


def program(body: str, others: str = "") -> str:
    """Optimized HLO of an entry computation, for four devices."""
    return (
        "HloModule jit_step, is_scheduled=true, replica_count=1, num_partitions=4\n\n"
        f"{others}\nENTRY %main (p: f32[1024]) -> f32[1024] {{\n{body}\n}}\n"
    )


def seconds_of(body: str, others: str = "") -> dict[str, float]:
    found = replay(program(body, others), CLUSTER, MESH)
    assert found.seconds == pytest.approx(sum(found.by_class.values()))
    return {name: each for name, each in found.by_class.items() if name != "launches"}


LOOP = """\
%fused (a: f32[1024]) -> f32[1024] {
  %a = f32[1024]{0} parameter(0)
  ROOT %double = f32[1024]{0} add(%a, %a)
}
"""


def test_a_kernel_takes_the_bytes_of_its_operands_and_results() -> None:
    body = """\
  %p = f32[1024]{0} parameter(0)
  %free = f32[32,32]{1,0} bitcast(%p)
  ROOT %f = f32[1024]{0} fusion(%p), kind=kLoop, calls=%fused"""
    found = replay(program(body, LOOP), CLUSTER, MESH)
    assert found.by_class == pytest.approx({"kernels": 8192e-9, "launches": 1e-7})
    assert (found.seconds, found.exposed_seconds) == pytest.approx((8.292e-6, 0))


SLICED = """\
%fused (a: f32[64,1024], i: s32[], u: f32[1,1024]) -> f32[64,1024] {
  %a = f32[64,1024]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %u = f32[1,1024]{1,0} parameter(2)
  %zero = s32[] constant(0)
  %part = f32[1,1024]{1,0} dynamic-slice(%a, %i, %zero), dynamic_slice_sizes={1,1024}
  %sum = f32[1,1024]{1,0} add(%part, %u)
  ROOT %root = ROOT
}
"""


@pytest.mark.parametrize(
    ("root", "num_bytes"),
    [
        # Two rows are read, and one is written.
        ("f32[1,1024]{1,0} add(%sum, %sum)", 3 * 4096 + 4),
        # One is read as an operand, and one in place, which is written, too.
        (
            "f32[64,1024]{1,0} dynamic-update-slice(%a, %sum, %i, %zero)",
            3 * 4096 + 4,
        ),
    ],
)
def test_of_what_is_sliced_and_updated_only_that_part_moves(
    root: str, num_bytes: int
) -> None:
    made = SLICED.replace("ROOT\n", root + "\n")
    result = root.partition(" ")[0]
    body = f"""\
  %p = f32[64,1024]{{1,0}} parameter(0)
  %i = s32[] parameter(1)
  %u = f32[1,1024]{{1,0}} parameter(2)
  ROOT %f = {result} fusion(%p, %i, %u), kind=kLoop, calls=%fused"""
    assert seconds_of(body, made) == pytest.approx({"kernels": num_bytes * 1e-9})


@pytest.mark.parametrize(
    ("line", "kind", "flops"),
    [
        (
            "%f = (f32[2,64,16]{2,1,0}, s8[4096]{0}) custom-call(%p, %q), "
            'custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":'
            '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],'
            '"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":["0"],'
            '"rhs_batch_dimensions":["0"]}}}',
            "products",
            2 * 2 * 64 * 16 * 4096,
        ),
        (
            "%f = f32[2,64,16]{2,1,0} dot(%p, %q), lhs_batch_dims={0}, "
            "lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}",
            "products",
            2 * 2 * 64 * 16 * 4096,
        ),
    ],
)
def test_a_product_takes_its_flops_where_these_are_longer(
    line: str, kind: str, flops: int
) -> None:
    quick = 2 * 4096 * (64 + 16) * 4 + 2 * 64 * 16 * 4
    body = f"""\
  %p = f32[2,64,4096]{{2,1,0}} parameter(0)
  %q = f32[2,4096,16]{{2,1,0}} parameter(1)
  ROOT {line}"""
    longer = max(flops / 1e12, quick / 1e9)
    assert seconds_of(body) == pytest.approx({kind: longer})


@pytest.mark.parametrize(
    ("target", "types"),
    [
        ("__cudnn$convForward", "BKO"),
        ("__cudnn$convBackwardInput", "OKB"),
        ("__cudnn$convBackwardFilter", "BOK"),
    ],
)
def test_a_convolution_and_its_gradients_have_the_same_flops(
    target: str, types: str
) -> None:
    shape = {"B": "[8,16,16,64]", "K": "[3,3,64,128]", "O": "[8,8,8,128]"}
    left, right, result = (f"f32{shape[each]}{{3,2,1,0}}" for each in types)
    body = f"""\
  %p = {left} parameter(0)
  %q = {right} parameter(1)
  ROOT %f = ({result}, s8[64]{{0}}) custom-call(%p, %q),\
 window={{size=3x3 stride=2x2}}, dim_labels=b01f_01io->b01f,\
 custom_call_target="{target}\""""
    cluster = Cluster("t", 1, 4, DEVICE, LINK, LINK, 0.0, 0.0, "")
    found = replay(program(body), cluster, MESH).by_class["convolutions"]
    flops = 2 * 8 * 8 * 8 * 128 * 64 * 9
    moved = 4 * (8 * 16 * 16 * 64 + 9 * 64 * 128 + 8 * 8 * 8 * 128)
    assert found == pytest.approx(max(flops / 1e12, moved / 1e9))


@pytest.mark.parametrize(
    ("target", "mask", "products"),
    [
        ("__cudnn$fmhaSoftmax", "NO_MASK", 2 / 0.75),
        ("__cudnn$fmhaSoftmax", "CAUSAL", 1 / 0.75),
        ("__cudnn$fmhaSoftmaxBackward", "CAUSAL", 2.5 / 0.6),
    ],
)
def test_fused_attention_takes_the_flops_of_its_products(
    target: str, mask: str, products: float
) -> None:
    config = '"intermediate_tensor_shape": {"dimensions": ["2", "8", "4096", "4096"]}'
    body = f"""\
  %p = bf16[2,4096,8,128]{{3,2,1,0}} parameter(0)
  ROOT %f = bf16[2,8,4096,128]{{3,1,2,0}} custom-call(%p, %p, %p),\
 custom_call_target="{target}", backend_config={{{config}, "mask_type": "{mask}"}}"""
    flops = 2 * products * 2 * 8 * 4096 * 4096 * 128
    moved = 4 * 2 * 4096 * 8 * 128 * 2
    longer = max(flops / 2e12, moved / 1e9)
    assert seconds_of(body) == pytest.approx({"attention": longer})


def test_what_is_sent_beside_kernels_is_waited_for_at_its_end() -> None:
    body = """\
  %p = f32[1024]{0} parameter(0)
  %start = (f32[1024]{0}, f32[4096]{0}) all-gather-start(%p), channel_id=1,\
 replica_groups={{0,1,2,3}}, dimensions={0}, use_global_device_ids=true
  %f = f32[1024]{0} fusion(%p), kind=kLoop, calls=%fused
  %done = f32[4096]{0} all-gather-done(%start)
  ROOT %t = (f32[1024]{0}, f32[4096]{0}) tuple(%f, %done)"""
    found = replay(program(body, LOOP), CLUSTER, MESH)
    sent = collective_seconds("all_gather", 16384, CLUSTER.link(MESH, ("x",)))
    beside = 8192e-9 + 1e-7
    assert found.by_class["collectives"] == pytest.approx(sent)
    assert found.seconds == pytest.approx(max(sent, beside))
    assert found.exposed_seconds == pytest.approx(sent - beside)


def test_a_loop_runs_as_often_as_its_trips() -> None:
    others = (
        LOOP
        + """
%body (s: (s32[], f32[1024])) -> (s32[], f32[1024]) {
  %s = (s32[], f32[1024]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[1024]{0} get-tuple-element(%s), index=1
  %f = f32[1024]{0} fusion(%x), kind=kLoop, calls=%fused
  ROOT %next = (s32[], f32[1024]{0}) tuple(%i, %f)
}

%test (s: (s32[], f32[1024])) -> pred[] {
  %s = (s32[], f32[1024]{0}) parameter(0)
  ROOT %less = pred[] constant(true)
}
"""
    )
    body = """\
  %p = (s32[], f32[1024]{0}) parameter(0)
  ROOT %w = (s32[], f32[1024]{0}) while(%p), condition=%test, body=%body,\
 backend_config={"known_trip_count":{"n":"7"}}"""
    assert seconds_of(body, others) == pytest.approx({"kernels": 7 * 8192e-9})


def test_tpus_take_the_cycles_that_their_compiler_estimates() -> None:
    cluster = Cluster.preset("v5e:2x2")
    body = """\
  %p = f32[1024]{0:T(1024)} parameter(0)
  %f = f32[1024]{0:T(1024)} fusion(%p), kind=kLoop, calls=%fused,\
 backend_config={"estimated_cycles":"3000"}
  ROOT %sum = f32[1024]{0:T(1024)} all-reduce(%f), channel_id=1,\
 replica_groups={{0,1,2,3}}, use_global_device_ids=true, to_apply=%fused"""
    found = replay(program(body, LOOP), cluster, MESH)
    sent = collective_seconds("all_reduce", 4096, cluster.link(MESH, ("x",)))
    assert found.by_class == pytest.approx({"kernels": 2e-6, "collectives": sent})
    assert found.exposed_seconds == pytest.approx(sent)


def test_a_permutation_in_cycles_of_unequal_length_waits_for_the_longest() -> None:
    line = (
        "%f = f32[1024]{0} collective-permute(%p), channel_id=1, source_target_pairs="
    )
    body = "  %p = f32[1024]{0} parameter(0)\n  ROOT " + line
    mixed = seconds_of(body + "{{0,0},{1,2},{2,3},{3,1}}")
    assert mixed == seconds_of(body + "{{1,2},{2,3},{3,1}}")
    assert mixed["collectives"] > 4096 / LINK.bandwidth
    assert seconds_of(body + "{{0,0},{1,1}}") == {"collectives": 0.0}
