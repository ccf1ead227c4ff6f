"""Collectives as XLA's compiler for TPUs writes them, read from what it wrote."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from autopar.audit.audit import audit
from autopar.audit.compiled_collectives import (
    collectives_in_compiled,
    collectives_on,
)
from autopar.audit.replay import replay
from autopar.audit.rewrites import compare
from autopar.clusters.cluster import Cluster
from autopar.lowering.memory_use import MemoryUse
from autopar.sharding.collective import Collective
from autopar.sharding.mesh import MeshShape

ALL = "replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true"
GROUPS = (tuple(range(8)),)
ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[]{:T(128)} parameter(0)
  %b = f32[]{:T(128)} parameter(1)
  ROOT %sum = f32[]{:T(128)} add(%a, %b)
}
"""


def program(entry: str, *computations: str) -> str:
    body = "".join(computations)
    header = "HloModule jit_step, is_scheduled=true, num_partitions=8"
    return f"{header}\n{ADD}{body}\nENTRY %main.1 (x: f32[8]) -> f32[8] {{\n{entry}\n}}"


def found(entry: str, *computations: str) -> Sequence[Collective]:
    return collectives_in_compiled(program(entry, *computations))


def gather(flag: str, count: int = 1, name: str = "g") -> str:
    config = (
        f'"async_collective_fusion_config":{{"flag_start":"{flag}","flag_end":"8"}}'
    )
    return (
        f"  %{name} = bf16[512,8192]{{1,0:T(8,128)(2,1)S(1)}} all-gather(%p), "
        f'channel_id=1, {ALL}, dimensions={{0}}, frontend_attributes={{chain_id="0"}}, '
        f'metadata={{op_name="all_gather"}}, backend_config={{{config}}}'
    )


def called(name: str, line: str) -> str:
    parameter = "  %p = bf16[64,8192]{1,0:T(8,128)(2,1)} parameter(0)"
    return (
        f"\n%{name} (p: bf16[64,8192]) -> bf16[512,8192] {{\n{parameter}\n{line}\n}}\n"
    )


def fusions(*names: str) -> str:
    return "\n".join(
        f"  %f.{n} = bf16[512,8192]{{1,0:T(8,128)(2,1)}} fusion(%x), kind=kCustom, "
        f"calls=%{n}"
        for n in names
    )


def test_a_gather_beside_other_work_is_written_often_and_counted_once() -> None:
    pieces = [("start", "-1"), ("between", "2"), ("between.1", "2"), ("done", "2")]
    bodies = [called(name, gather(flag)) for name, flag in pieces]
    entry = fusions(*(name for name, _ in pieces))
    (each,) = found(entry, *bodies)
    assert each == Collective("all_gather", GROUPS, "bfloat16", 512 * 8192 * 2)
    assert each.is_async
    twice = [called("start.2", gather("-1")), *bodies]
    assert len(found(entry + "\n" + fusions("start.2"), *twice)) == 2


LOOP = """
%body (s: (s32[], f32[8])) -> (s32[], f32[8]) {
  %s = (s32[]{:T(128)}, f32[8]{0:T(128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%s), index=0
  %v = f32[8]{0:T(128)} get-tuple-element(%s), index=1
  %one = s32[]{:T(128)} constant(STEP)
  %next = s32[]{:T(128)} add(%i, %one)
  %r = f32[8]{0:T(128)S(1)} all-reduce(%v), channel_id=1, GROUPS, to_apply=%add
  ROOT %t = (s32[]{:T(128)}, f32[8]{0:T(128)}) tuple(%next, %r)
}

%condition (c: (s32[], f32[8])) -> pred[] {
  %c = (s32[]{:T(128)}, f32[8]{0:T(128)}) parameter(0)
  %limit = s32[]{:T(128)} constant(LIMIT)
  %j = s32[]{:T(128)} get-tuple-element(%c), index=0
  ROOT %lt = pred[]{:T(512)} compare(%j, %limit), direction=LT
}
"""
STARTED = """  %x = f32[8]{0:T(128)} parameter(0)
  %zero = s32[]{:T(128)} constant(0)
  %copy = s32[]{:T(128)} copy(%zero)
  %start = (s32[]{:T(128)}, f32[8]{0:T(128)}) tuple(START, %x)
  %w = (s32[], f32[8]{0:T(128)}) while(%start), condition=%condition, body=%body
"""


def loop(step: str = "1", limit: str = "4") -> str:
    text = LOOP.replace("GROUPS", ALL)
    return text.replace("STEP", step).replace("LIMIT", limit)


@pytest.mark.parametrize(("step", "limit", "trips"), [("1", "4", 4), ("2", "5", 3)])
def test_a_loop_that_does_not_say_how_often_it_runs_is_counted(
    step: str, limit: str, trips: int
) -> None:
    (each,) = found(STARTED.replace("START", "%copy"), loop(step, limit))
    assert (each.count, each.unbounded) == (trips, False)


def test_a_loop_that_starts_anywhere_is_of_unknown_length() -> None:
    entry = STARTED.replace("START", "%y") + "  %y = s32[]{:T(128)} parameter(1)\n"
    (each,) = found(entry, loop())
    assert (each.count, each.unbounded) == (1, True)
    planned = [Collective("all_reduce", GROUPS, "float32", 32, 4, "sum")]
    assert not compare(planned, [each]).is_allowed


def test_a_limit_that_the_loop_carries_unchanged_is_known() -> None:
    carried = loop().replace("%limit = s32[]{:T(128)} constant(4)", "LINE")
    carried = carried.replace(
        "LINE", "%limit = s32[]{:T(128)} get-tuple-element(%c), index=2"
    )
    kept = "  %n = s32[]{:T(128)} get-tuple-element(%s), index=2\n  ROOT %t"
    carried = carried.replace("  ROOT %t", kept).replace(
        "(%next, %r)", "(%next, %r, %n)"
    )
    entry = STARTED.replace("START, %x)", "%copy, %x, %five)").replace(
        "  %copy", "  %five = s32[]{:T(128)} constant(5)\n  %copy"
    )
    (each,) = found(entry, carried)
    assert (each.count, each.unbounded) == (5, False)
    changed = carried.replace("(%next, %r, %n)", "(%next, %r, %next)")
    assert found(entry, changed)[0].unbounded


SUMS = """  %x = f32[64]{0:T(128)} parameter(0)
  %r = (f32[64]{0:T(128)S(1)}, f32[64]{0:T(128)S(1)}) all-reduce(%x, %x), """
SUMS += f"channel_id=9, {ALL}, to_apply=%add\n"
WHOLE = Collective("all_reduce", GROUPS, "float32", 256, reduction="sum")
GATHERED = Collective("all_gather", GROUPS, "float32", 256)
PART = Collective("reduce_scatter", GROUPS, "float32", 32, reduction="sum")


@pytest.mark.parametrize("other", [GATHERED, PART])
def test_a_sum_may_stand_for_what_is_planned_and_not_there(other: Collective) -> None:
    compiled = found(SUMS)
    assert compiled == (WHOLE, WHOLE)
    for planned in ([WHOLE, WHOLE], [other, WHOLE], [other, other]):
        made = audit(planned, planned, compiled, num_devices=8)
        made.raise_if_wrong()
        told = " ".join(row.explanation for row in made.rows)
        number = planned.count(other)
        words = f"sum: {number} x {other.bytes} B float32 by all_reduce"
        assert (words in told) == (number > 0)


@pytest.mark.parametrize(
    "planned",
    [
        [WHOLE],  # one too many
        [GATHERED],
        [replace(GATHERED, bytes=512), WHOLE],
        [replace(PART, bytes=64), WHOLE],
        [replace(PART, reduction="max"), WHOLE],
        [replace(GATHERED, groups=((0, 1), (2, 3), (4, 5), (6, 7))), WHOLE],
    ],
)
def test_a_sum_stands_for_nothing_else(planned: list[Collective]) -> None:
    assert not audit(planned, planned, found(SUMS), num_devices=8).ok
    gpus = found(SUMS.replace(":T(128)", "").replace("S(1)", ""))
    assert not audit([GATHERED] * 2, [GATHERED] * 2, gpus, num_devices=8).ok


def test_braces_of_a_kernel_s_metadata_end_no_computation() -> None:
    kernel = """  %k = f32[8]{0} custom-call(%x), frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 128}"
}}, custom_call_target="tpu_custom_call"
"""
    assert found(kernel + SUMS) == found(SUMS) and found(SUMS)


def test_what_is_gathered_once_more_instead_of_kept_is_named() -> None:
    planned = [Collective("all_gather", GROUPS, "float32", 256)]
    again = replace(planned[0], is_again=True)
    comparison = compare(planned, [*planned, again])
    assert comparison.is_allowed and str(comparison) == "again: 1 x 256 B float32"
    assert not compare(planned, [*planned, *planned]).is_allowed
    assert not compare(planned, [*planned, replace(again, bytes=512)]).is_allowed
    found_again = found(SUMS.replace("%r =", "%r.remat ="))
    assert {each.is_again for each in found_again} == {True}
    compiled = [WHOLE, *found_again]
    compiled = [replace(each, may_round=True) for each in compiled]
    audit(planned, planned, compiled, num_devices=8).raise_if_wrong()


def test_only_a_compiler_for_tpus_may_sum_in_what_products_read() -> None:
    line = f"all-reduce(%x), channel_id=1, {ALL}, to_apply=%add"
    planned = [Collective("all_reduce", GROUPS, "float32", 256, reduction="sum")]

    def told(layout: str) -> tuple[str, bool]:
        seen = compare(planned, found(f"  %r = bf16[64]{{{layout}}} {line}"))
        return str(seen), seen.is_allowed

    assert told("0:T(256)(128)(2,1)") == (
        "narrow: 1 x 256 B float32 sent as bfloat16",
        True,
    )
    assert told("0") == ("not planned: 1 x 128 B bfloat16", False)


def test_the_program_of_one_slice_of_several_is_not_compared() -> None:
    text = program(SUMS)
    assert collectives_on(8, text) == collectives_in_compiled(text)
    assert collectives_on(16, text) is None
    planned = [Collective("all_reduce", GROUPS, "float32", 256, reduction="sum")]
    memory = MemoryUse(1, 1, 1, 1)
    made = audit(planned, planned, None, num_devices=8, memory=memory)
    assert made.ok
    assert "only the lowered collectives are compared" in str(made)


def test_cycles_are_those_of_fusions_times_trips() -> None:
    cycles = ', backend_config={"window_config":{"estimated_cycles":"100"}}'
    fused = f"  %f = f32[8]{{0:T(128)}} fusion(%v), kind=kLoop, calls=%inner{cycles}\n"
    body = "  ROOT %t = f32[8]{0:T(128)} tanh(%q)\n"
    inner = f"\n%inner (q: f32[8]) -> f32[8] {{\n{body}}}\n"
    inside = loop().replace("  %next", f"{fused}  %next")
    unknown = fused.replace('"100"', f'"{2**63 - 1}"')
    text = program(STARTED.replace("START", "%copy") + fused + unknown, inside, inner)
    found = replay(text, Cluster.preset("v5e:2x4"), MeshShape(("x",), (8,)))
    assert found.by_class["kernels"] == pytest.approx((100 + 4 * 100) / 1.5e9)
