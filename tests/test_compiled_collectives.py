"""Optimized HLO of other backends, as text: what the CPU never prints is read too."""

import re
from textwrap import dedent, indent

import pytest

from autopar.audit.compiled_collectives import collectives_in_compiled
from autopar.sharding.collective import Collective

PAIRS = ((0, 2), (1, 3), (4, 6), (5, 7))
QUADS = ((0, 1, 2, 3), (4, 5, 6, 7))
ALL = (tuple(range(8)),)

HEADER = """\
HloModule jit_step, is_scheduled=true, replica_count=1, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""


def module(entry: str, computations: str = "") -> str:
    """The text of a module; a line that ends with a comma goes on in the next."""
    body = indent(dedent(entry).strip(), "  ")
    main = f"ENTRY %main (x: f32[8]) -> f32[8] {{\n{body}\n}}\n"
    return re.sub(r",\n +", ", ", f"{HEADER}\n{dedent(computations)}\n{main}")


def read(entry: str, computations: str = "") -> tuple[Collective, ...]:
    return collectives_in_compiled(module(entry, computations))


def reduce_over(groups: str, flags: str = ", use_global_device_ids=true") -> str:
    return (
        f"%ar = f32[8]{{0}} all-reduce(%x), channel_id=1{groups}{flags}, to_apply=%add"
    )


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        (", replica_groups={{0,1,2,3},{4,5,6,7}}", QUADS),
        (", replica_groups=[2,4]<=[8]", QUADS),
        (", replica_groups=[4,2]<=[2,2,2]T(0,2,1)", PAIRS),
        (", replica_groups=mesh['x'=2,'y'=4] {'y'}", QUADS),
        (", replica_groups=mesh['x'=2,'y'=4] {'x','y'}", ALL),
        (", replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", None),
        (", replica_groups={}", ALL),
        ("", ALL),
    ],
)
def test_groups_in_every_spelling(
    text: str, groups: tuple[tuple[int, ...], ...] | None
) -> None:
    (found,) = read(reduce_over(text))
    assert found.groups == (groups or ((0, 2), (1, 3)))


@pytest.mark.parametrize(
    ("header", "line", "groups"),
    [
        # Ids of replicas, and all partitions of each take part.
        ("replica_count=2, num_partitions=2", reduce_over("", ""), ((0, 1, 2, 3),)),
        (
            "replica_count=2, num_partitions=2",
            reduce_over(", replica_groups={{0},{1}}", ""),
            ((0, 1), (2, 3)),
        ),
        # No channel: replicas talk, each partition apart.
        (
            "replica_count=2, num_partitions=2",
            "%ar = f32[8]{0} all-reduce(%x), replica_groups={}, to_apply=%add",
            ((0, 2), (1, 3)),
        ),
        # With a channel, what moves whole pieces counts partitions.
        (
            "replica_count=2, num_partitions=2",
            "%aa = f32[8]{0} all-to-all(%x), channel_id=1, replica_groups={{0,1}}, "
            "dimensions={0}",
            ((0, 1), (2, 3)),
        ),
        (
            "num_partitions=8",
            "%cp = f32[8]{0} collective-permute(%x), channel_id=1, "
            "source_target_pairs={{1,0},{0,1}}",
            ((0, 1), (1, 0)),
        ),
    ],
)
def test_ids_count_replicas_partitions_or_both(
    header: str, line: str, groups: tuple[tuple[int, ...], ...]
) -> None:
    text = module(line).replace("replica_count=1, num_partitions=8", header)
    (found,) = collectives_in_compiled(text)
    assert found.groups == groups


def test_asynchronous_pairs_are_counted_once_by_their_result() -> None:
    found = read(
        """
        %ars = f32[8]{0} all-reduce-start(%x), channel_id=1,
            replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true,
            to_apply=%add
        %ar = f32[8]{0} all-reduce-done(%ars)
        %ags = (f32[8]{0}, f32[32]{0}) all-gather-start(%ar), channel_id=2,
            replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0},
            use_global_device_ids=true
        %ag = f32[32]{0} all-gather-done(%ags)
        %rss = ((f32[32]{0}), f32[8]{0}, s32[]) reduce-scatter-start(%ag), channel_id=3,
            replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true,
            dimensions={0}, to_apply=%add
        %rsu = ((f32[32]{0}), f32[8]{0}, s32[]) reduce-scatter-update(%rss)
        %rs = f32[8]{0} reduce-scatter-done(%rsu)
        %aas = ((f32[8]{0}), f32[8]{0}, u32[], u32[]) all-to-all-start(%rs),
            channel_id=4, replica_groups=[4,2]<=[2,2,2]T(0,2,1), dimensions={0}
        %aa = f32[8]{0} all-to-all-done(%aas)
        %cps = (f32[8]{0:T(128)}, f32[8]{0:T(128)S(1)}, u32[]{:S(2)},
            u32[]{:S(2)}) collective-permute-start(%aa), channel_id=5,
            source_target_pairs={{0,1},{1,0}}
        ROOT %cp = f32[8]{0:T(128)} collective-permute-done(%cps)
        """
    )
    assert found == (
        Collective("all_reduce", ALL, "float32", 32, reduction="sum"),
        Collective("all_gather", QUADS, "float32", 128),
        Collective("reduce_scatter", QUADS, "float32", 32, reduction="sum"),
        Collective("all_to_all", PAIRS, "float32", 32),
        Collective("collective_permute", ((0, 1), (1, 0)), "float32", 32),
    )


def test_a_wrapped_asynchronous_collective_is_counted_once() -> None:
    found = read(
        """
        %start = ((f32[8]{0}), f32[2]{0}, s32[]) async-start(%x), calls=%wrapped
        ROOT %done = f32[2]{0} async-done(%start), calls=%wrapped
        """,
        """
        %wrapped (p: f32[8]) -> f32[2] {
          %p = f32[8]{0} parameter(0)
          ROOT %rs = f32[2]{0} reduce-scatter(%p), channel_id=3,
              replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true,
              dimensions={0}, to_apply=%add
        }, execution_thread="parallel"
        """,
    )
    expected = Collective("reduce_scatter", QUADS, "float32", 8, reduction="sum")
    assert found == (expected,)


def test_combined_collectives_are_split_into_their_pieces() -> None:
    found = read(
        """
        %ar = (f32[8]{0}, bf16[2,4]{1,0}, /*index=2*/f32[]) all-reduce(%x, %y,
            /*index=2*/%z), channel_id=1, replica_groups={}, use_global_device_ids=true,
            to_apply=%add
        %ags = ((f32[8]{0}, f32[2]{0}), (f32[64]{0}, f32[16]{0})) all-gather-start(%x,
            %w), channel_id=2, replica_groups={}, dimensions={0},
            use_global_device_ids=true
        """
    )
    pieces = [(each.kind, each.dtype, each.bytes) for each in found]
    assert pieces == [
        ("all_reduce", "float32", 32),
        ("all_reduce", "bfloat16", 16),
        ("all_reduce", "float32", 4),
        ("all_gather", "float32", 256),
        ("all_gather", "float32", 64),
    ]


def test_an_exchange_written_as_a_tuple_is_one_array() -> None:
    (found,) = read(
        "%aa = (f32[2]{0}, f32[2]{0}, f32[2]{0}, f32[2]{0}) all-to-all(%a, %b, %c, %d),"
        " channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}"
    )
    assert found == Collective("all_to_all", QUADS, "float32", 32)


def test_loops_fusions_calls_and_branches_are_walked() -> None:
    found = read(
        """
        %w = (s32[], f32[8]{0}) while(%t), condition=%cond, body=%body,
            metadata={op_name="jit(step)/while calls=%nothing"},
            backend_config={"known_trip_count":{"n":"12"},"known_init_step":{"init":"0","step":"1"}}
        %c = f32[8]{0} conditional(%p, %x, %x), true_computation=%inner,
            false_computation=%inner
        %d = f32[8]{0} conditional(%i, %x, %x), branch_computations={%inner, %inner}
        %u = (s32[], f32[8]{0}) while(%t), condition=%cond, body=%body
        """,
        """
        %inner (p: f32[8]) -> f32[8] {
          %p = f32[8]{0} parameter(0)
          ROOT %ar = f32[8]{0} all-reduce(%p), channel_id=1, replica_groups={},
              use_global_device_ids=true, to_apply=%add,
              metadata={op_name="jit(step)/psum" source_file="step.py" source_line=3}
        }

        %body (t: (s32[], f32[8])) -> (s32[], f32[8]) {
          %f = f32[8]{0} fusion(%g), kind=kCustom, calls=%inner
          %h = f32[8]{0} call(%f), to_apply=%inner
        }

        %cond (t: (s32[], f32[8])) -> pred[] {
          ROOT %lt = pred[] compare(%i, %n), direction=LT
        }
        """,
    )
    marks = [(each.count, each.conditional, each.unbounded) for each in found]
    assert marks == [
        *[(12, False, False)] * 2,
        *[(1, True, False)] * 4,
        *[(1, False, True)] * 2,
    ]
    assert {each.source for each in found} == {"jit(step)/psum"}


def test_text_without_percent_signs_and_parameter_lists_is_read() -> None:
    line = (
        "all-reduce(bf16[1,64]{1,0} input), channel_id=1, "
        "replica_groups={{0,1},{2,3}}, use_global_device_ids=true, to_apply=add_region"
    )
    text = f"""
        HloModule stage, num_partitions=4

        add_region {{
          a = bf16[] parameter(0)
          b = bf16[] parameter(1)
          ROOT sum = bf16[] add(a, b)
        }}

        ENTRY main {{
          input = bf16[1,64]{{1,0}} parameter(0)
          ROOT out = bf16[1,64]{{1,0}} {line}
        }}
        """
    (found,) = collectives_in_compiled(dedent(text))
    groups = ((0, 1), (2, 3))
    assert found == Collective("all_reduce", groups, "bfloat16", 128, reduction="sum")


def test_unknown_spellings_are_refused() -> None:
    with pytest.raises(ValueError, match="must be spelled"):
        read(reduce_over(", replica_groups=ring(8)"))
    with pytest.raises(ValueError, match="element type 'q4'"):
        read(reduce_over("").replace("f32", "q4"))
    with pytest.raises(ValueError, match="ENTRY"):
        collectives_in_compiled("module @jit_step {}")
