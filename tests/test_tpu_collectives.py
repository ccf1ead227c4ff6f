"""Collectives as XLA's compiler for TPUs writes them, read from what it wrote."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from autopar.audit.audit import audit
from autopar.audit.compiled_collectives import (
    collectives_in_compiled,
    collectives_on,
)
from autopar.audit.memory_use import MemoryUse
from autopar.audit.rewrites import compare
from autopar.sharding.collective import Collective

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


PIECES = """  %x = f32[8]{0:T(128)} parameter(0)
  %nil = f32[]{:T(128)} constant(FILL)
  %zeros = f32[64]{0:T(128)} broadcast(%nil), dimensions={}
  %at = u32[]{:T(128)S(6)} INDEX
  %placed = f32[64]{0:T(128)} dynamic-update-slice(%zeros, %x, %at)
  %r = (f32[64]{0:T(128)S(1)}, f32[64]{0:T(128)S(1)}) all-reduce(%placed, %whole), """
PIECES += f"channel_id=9, {ALL}, to_apply=%add\n"


@pytest.mark.parametrize("index", ["partition-id()", "replica-id()"])
def test_a_sum_of_pieces_in_zeros_is_a_gather(index: str) -> None:
    text = PIECES.replace("INDEX", index)
    first, second = found(text.replace("FILL", "0"))
    assert first == Collective("all_gather", GROUPS, "float32", 256)
    assert first.by_all_reduce
    assert second == Collective("all_reduce", GROUPS, "float32", 256, reduction="sum")
    assert not second.by_all_reduce
    assert {each.kind for each in found(text.replace("FILL", "1"))} == {"all_reduce"}


def test_a_sum_of_pieces_that_lie_alike_is_none() -> None:
    text = PIECES.replace("FILL", "0").replace("INDEX", "parameter(1)")
    assert {each.kind for each in found(text)} == {"all_reduce"}


IN_SLICES = """  %s0 = ((f32[64]{0:T(128)}), f32[32]{0:T(128)S(1)}, s32[]{:S(2)}) slice-start(%placed), slice={[32:64]}
  %s1 = ((f32[64]{0:T(128)}), f32[32]{0:T(128)S(1)}, s32[]{:S(2)}) slice-start(%placed), slice={[0:32]}
  %d0 = f32[32]{0:T(128)S(1)} slice-done(%s0)
  %d1 = f32[32]{0:T(128)S(1)} slice-done(%s1)
  %all = f32[64]{0:T(128)S(1)} custom-call(%d0, %d1), custom_call_target="ConcatBitcast"
"""  # noqa: E501


@pytest.mark.parametrize("last", ["[0:32]", "[32:64]", "[0:16]"])
def test_pieces_copied_in_slices_are_followed(last: str) -> None:
    text = PIECES.replace("INDEX", "partition-id()").replace("FILL", "0")
    text = text.replace("  %r =", IN_SLICES.replace("[0:32]", last) + "  %r =")
    first, _ = found(text.replace("(%placed, %whole)", "(%all, %whole)"))
    is_all = last == "[0:32]"
    assert first.kind == ("all_gather" if is_all else "all_reduce")


def test_braces_of_a_kernel_s_metadata_end_no_computation() -> None:
    kernel = """  %k = f32[8]{0} custom-call(%x), frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 128}"
}}, custom_call_target="tpu_custom_call"
"""
    text = PIECES.replace("INDEX", "partition-id()").replace("FILL", "0")
    assert found(kernel + text) == found(text) and found(text)


def test_what_is_gathered_once_more_instead_of_kept_is_named() -> None:
    planned = [Collective("all_gather", GROUPS, "float32", 256)]
    again = replace(planned[0], is_again=True)
    comparison = compare(planned, [*planned, again])
    assert comparison.is_allowed and str(comparison) == "again: 1 x 256 B float32"
    assert not compare(planned, [*planned, *planned]).is_allowed
    assert not compare(planned, [*planned, replace(again, bytes=512)]).is_allowed
    text = PIECES.replace("INDEX", "partition-id()").replace("FILL", "0")
    found_again = found(text.replace("%r =", "%r.remat ="))
    assert {each.is_again for each in found_again} == {True}


SLICED = """  %at = u32[]{:T(128)S(6)} INDEX
  %r = (f32[1,64]{1,0:T(2,128)}, f32[1,64]{1,0:T(2,128)}) all-reduce(%x, %y), """
SLICED += f"""channel_id=9, {ALL}, to_apply=%add
  %e = f32[1,64]{{1,0:T(2,128)}} get-tuple-element(%r), index=0
  %k = f32[1,64]{{1,0:T(2,128)}} get-tuple-element(%r), index=1
  %s = f32[8]{{0:T(128)}} fusion(%e, %at), kind=kLoop, calls=%read
  %u = f32[1,64]{{1,0:T(2,128)}} add(%k, %k)
"""
READ = """
%read (e: f32[1,64], at: u32[]) -> f32[8] {
  %e = f32[1,64]{1,0:T(2,128)} parameter(0)
  %at = u32[]{:T(128)S(6)} parameter(1)
  %o = u32[]{:T(128)} constant(0)
  %d = f32[1,SIZE]{1,0:T(2,128)} dynamic-slice(%e, %o, %at), dynamic_slice_sizes={1,8}
  ROOT %b = f32[8]{0:T(128)S(1)} bitcast(%d)
}
"""


def test_a_sum_of_which_each_device_reads_its_slice_is_a_reduce_scatter() -> None:
    text, read = SLICED.replace("INDEX", "partition-id()"), READ.replace("SIZE", "8")
    first, second = found(text, read)
    assert first == Collective("reduce_scatter", GROUPS, "float32", 32, reduction="sum")
    assert first.by_all_reduce
    assert second.kind == "all_reduce"


@pytest.mark.parametrize(
    ("index", "size", "more"),
    [
        ("parameter(1)", "8", ""),  # all read the same slice
        ("partition-id()", "16", ""),  # slices overlap
        ("partition-id()", "8", "  %z = f32[1,64]{1,0:T(2,128)} negate(%e)\n"),
    ],
)
def test_a_sum_that_is_read_otherwise_is_one(index: str, size: str, more: str) -> None:
    text = SLICED.replace("INDEX", index) + more
    assert found(text, READ.replace("SIZE", size))[0].kind == "all_reduce"


def test_a_planned_sum_of_which_each_device_reads_its_slice_stays_one() -> None:
    text, read = SLICED.replace("INDEX", "partition-id()"), READ.replace("SIZE", "8")
    whole = Collective("all_reduce", GROUPS, "float32", 256, reduction="sum")
    part = Collective("reduce_scatter", GROUPS, "float32", 32, reduction="sum")
    compiled = found(text, read)
    for planned in ([whole, whole], [part, whole]):
        audit(planned, planned, compiled, num_devices=8).raise_if_wrong()
    other = replace(part, bytes=64)
    assert not audit([other], [other], compiled[:1], num_devices=8).ok


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
    text = program(SLICED.replace("INDEX", "partition-id()"))
    assert collectives_on(8, text) == collectives_in_compiled(text)
    assert collectives_on(16, text) is None
    planned = [Collective("all_reduce", GROUPS, "float32", 256, reduction="sum")]
    memory = MemoryUse(1, 1, 1, 1)
    made = audit(planned, planned, None, num_devices=8, memory=memory)
    assert made.ok
    assert "only the lowered collectives are compared" in str(made)


def test_what_is_summed_instead_is_told() -> None:
    planned = [Collective("all_gather", GROUPS, "float32", 256)]
    text = PIECES.replace("FILL", "0").replace("INDEX", "partition-id()")
    compiled = found(text)[:1]
    told = compare(planned, compiled)
    assert (str(told), told.is_allowed) == (
        "sum: 1 x 256 B float32 by all_reduce",
        True,
    )
