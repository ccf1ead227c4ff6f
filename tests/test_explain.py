"""What a plan prints as: one screen, complete, and the same on every machine."""

import inspect
import math
from dataclasses import replace
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.plans import explain
from autopar.plans.explain import (
    format_bytes,
    format_seconds,
)
from autopar.plans.leaf_groups import group_leaves
from autopar.plans.plan import InputPlan
from autopar.plans.plan_view import format_source
from autopar.sharding.spec import REPLICATED
from autopar.steps.parallel_plan import Plan
from benchmarks.models import build
from tests.tiny_plans import format_plan, make_plan

GOLDEN = """\
plan of step, for one step
mesh         data:2;model:2 (4 devices), cluster 1x4xA100
predicted    5 us = 4 us compute + 1 us collectives
collectives  288 B a device
memory       2.0 KiB a device at the peak, 512 B of it state
gap          at most 0.100% from the optimum
split        100.0% of the heavy flops, none twice

state and batch
leaf                    leaves  shape      split over     bytes a device
params['layer_*']['w']       2  [2, 8, 8]  [-, -, model]           512 B
x                            1  [4, 8]     [data, -]                64 B

heavy operators (1 of 3): the dim of the result that each axis splits
operator     line                     data   model  compute
dot_general  /far/model.py:7 (layer)  dim 0  sum      75.0%

collectives, a device a step
line                     collective          over        count  bytes
/far/model.py:7 (layer)  all_reduce(sum)     model           2  128 B
x                        all_gather          data,model      1  128 B
                         collective_permute  model           1   32 B"""

OPERATORS = """\
operators: the factor each axis splits, and the specs it makes
operator             line                     factors           makes                 seconds
scan.0               /far/model.py:7 (layer)  -                 [-, -]                    0 s
jvp()/dot_general.0  /far/model.py:7 (layer)  data:m0 model:k0  [data, -] sum(model)     3 us
jvp()/tanh.0         /far/model.py:7 (layer)  data:d0 model:-   [data, -]                1 us
"""  # noqa: E501

MODULES = ("query", "key", "value", "out", "up", "down")
LEAVES = ("bias", "kernel")
TREES = ("state.params", "state.opt_state[0].mu", "state.opt_state[0].nu")


def adam_state(num_layers: int) -> tuple[InputPlan, ...]:
    """Parameters and moments of a deep model, and Adam's counter."""
    leaves = [
        InputPlan(
            f"{tree}['layers'][{layer}]['{module}']['{leaf}']",
            "state",
            (REPLICATED, 0),
            (64,),
            128,
        )
        for tree in TREES
        for layer in range(num_layers)
        for module in MODULES
        for leaf in LEAVES
    ]
    count = InputPlan("state.opt_state[0].count", "state", (REPLICATED,) * 2, (), 4)
    return (*leaves, count)


def test_a_tiny_plan_prints_as_agreed() -> None:
    assert format_plan(make_plan()) == GOLDEN


def test_the_gap_is_told_where_there_is_a_bound() -> None:
    plan = make_plan()
    assert "at most 0.100% from the optimum" in format_plan(plan)
    predicted = replace(plan.predicted, optimality_gap=math.inf)
    assert predicted.gap_words.startswith("no ")
    assert predicted.gap_words in format_plan(replace(plan, predicted=predicted))


def test_all_operators_are_listed_on_request() -> None:
    assert OPERATORS in format_plan(make_plan(), operators=True)


def test_a_model_of_48_layers_with_adam_is_one_screen() -> None:
    text = format_plan(replace(make_plan(), inputs=adam_state(48)))
    assert len(text.splitlines()) < 40
    assert "..['layers'][*]['query']['kernel']     144  [64]" in text
    assert (
        ".. is state.params, counted with what is split alike in "
        "state.opt_state[0].mu, state.opt_state[0].nu"
    ) in text.replace("\n", " ")


def test_a_plan_is_shown_by_its_summary_and_printed_whole() -> None:
    plan = Plan(replace(make_plan(), inputs=adam_state(48)))
    assert len(repr(plan).splitlines()) <= 20
    assert "data:2;model:2" in repr(plan) and "print(plan)" in repr(plan)
    whole, alone = str(plan).splitlines(), format_plan(plan.decision).splitlines()
    # Answers come first, below the title.
    assert whole[0] == alone[0] and whole[1].startswith("fits  ")
    assert [line for line in whole if line in alone] == alone


def test_a_notebook_shows_the_summary_and_a_table_of_state() -> None:
    hostile = InputPlan("state['<b>']", "state", (0, REPLICATED), (8,), 16)
    plan = make_plan()
    page = Plan(replace(plan, inputs=(*plan.inputs, hostile)))._repr_html_()
    assert "<pre>plan of step" in page and page.count("\n") > 8
    for cell in ("params[&#x27;layer_*&#x27;][&#x27;w&#x27;]", "[2, 8, 8]", "512 B"):
        assert cell in page
    assert "&lt;b&gt;" in page and "<b>" not in page
    assert "\nx  " not in page, "a batch is no state"


def test_a_layer_that_is_split_otherwise_has_its_own_row() -> None:
    leaves = list(adam_state(4))
    path = "state.params['layers'][2]['up']['kernel']"
    (index,) = [i for i, leaf in enumerate(leaves) if leaf.path == path]
    leaves[index] = replace(leaves[index], spec=(0, REPLICATED))
    alone = [group for group in group_leaves(leaves) if group.path == path]
    assert [len(group.leaves) for group in alone] == [1]


def test_no_leaf_is_lost_or_counted_twice() -> None:
    leaves = adam_state(3)
    groups = group_leaves(leaves)
    assert sorted(leaf.path for group in groups for leaf in group.leaves) == sorted(
        leaf.path for leaf in leaves
    )


def test_likeness_by_chance_joins_nothing() -> None:
    paths = ("a['w']", "b['w']", "w1", "w2", "x[0]['w']", "x[1]['v']")
    leaves = [InputPlan(path, "state", (REPLICATED,) * 2, (2,), 8) for path in paths]
    assert [group.path for group in group_leaves(leaves)] == list(paths)


def test_lines_fit_and_names_with_brackets_are_not_markup() -> None:
    long = InputPlan("state['bold']" + "['deep']" * 20, "state", (0, 0), (8,), 8)
    text = format_plan(replace(make_plan(), inputs=(long,)))
    assert max(map(len, text.splitlines())) <= 100
    joined = "".join(line[:64].strip() for line in text.splitlines())
    assert "state['bold']" in joined and joined.count("['deep']") >= 15


def test_a_deep_plan_is_as_long_as_a_shallow_one() -> None:
    def text(num_layers: int) -> str:
        workload = build("mlp", num_layers=num_layers)
        step = autopar.parallelize(workload.step, method=autopar.Zero(3), mesh="x:8")
        return format_plan(step.plan(*workload.abstract()).sharding)

    shallow, deep = text(4), text(8)
    assert len(deep.splitlines()) == len(shallow.splitlines()) < 80
    assert "['layers'][*]['kernel']" in deep


def test_what_loops_gather_of_arguments_is_named_by_these() -> None:
    workload = build("mlp", num_layers=2)
    options = {"mesh": "x:8", "num_microbatches": 2, "method": autopar.Zero(3)}
    plan = autopar.parallelize(workload.step, **options).plan(*workload.abstract())
    gathered = [each for each in plan.sharding.collectives if each.count == 2]
    sources = {each.source for each in gathered}
    assert "state.params['layers'][0]['kernel']" in sources
    assert "state.params['layers'][*]['kernel']" in format_plan(plan.sharding)


def test_long_names_of_groups_are_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain, "MOST_OF_GROUPS", 8)
    assert "x                        all_gather          data,..." in format_plan(
        make_plan()
    )


def test_without_collectives_or_bound_it_says_so() -> None:
    plan = replace(make_plan(gap=math.inf), collectives=())
    assert "no collectives: every device works on its own" in format_plan(plan)
    assert "no bound is known" in format_plan(plan)


def test_source_lines_are_relative_below_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    inside = f"{tmp_path}/models/gpt.py:12:3 (attention.<locals>.heads)"
    assert format_source(inside) == "models/gpt.py:12 (heads)"
    assert format_source("/far/gpt.py:12:3 (loss)") == "/far/gpt.py:12 (loss)"
    package = "/v/lib/python3.11/site-packages/flax/linen/linear.py:287:4 (__call__)"
    assert format_source(package) == "flax/linen/linear.py:287 (__call__)"
    assert format_source("state['w 1']") == "state['w 1']"
    assert format_source("") == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (2.5e-9, "2.5 ns"),
        (9.9999e-7, "1 us"),
        (4.2e-5, "42 us"),
        (0.0123, "12.3 ms"),
        (61, "61 s"),
    ],
)
def test_seconds_have_three_digits_and_a_unit(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_bytes_have_a_unit() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1536, 3 << 30)] == [
        "0 B",
        "1,023 B",
        "1.5 KiB",
        "3.0 GiB",
    ]


def test_the_line_is_that_of_the_model_and_not_of_the_library_of_its_layers() -> None:
    """Flax and jit have lines of their own; take_along_axis is a jit without any."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            hidden = nn.Dense(16)(x)
            return jnp.take_along_axis(hidden, x[:, :1].astype(int), 1)

    x = jax.ShapeDtypeStruct((16, 8), jnp.float32)
    params = jax.eval_shape(Net().init, jax.random.key(0), x)
    plan = autopar.parallelize(Net().apply, mesh="x:8").plan(params, x)
    lines = {op.kind: op.source for op in plan.sharding.operators}
    source, first = inspect.getsourcelines(Net)
    for kind, words in (("dot_general", "Dense"), ("gather", "take_along_axis")):
        number = first + next(i for i, line in enumerate(source) if words in line)
        assert f"test_explain.py:{number}:" in lines[kind]
        assert format_source(lines[kind]).endswith(f":{number} (__call__)")
