"""Rows of Mesh-TensorFlow: layouts of named dims as users write them, and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import autopar
from autopar.sharding.spec import to_partition_spec
from tests.rows.fixtures import Case, f1, f3, random
from tests.rows.running import homes, run_as_planned, sent_bytes, traffic

F1_NAMES = {
    "x": "batch io",
    "y": ("batch", "io"),
    "params['w']": "io,hidden",
    "params/v": "hidden io",
}
SIX_LAYOUTS = {
    "none": ("all:8", "", {}),
    "batch": ("all:8", "batch:all", {"all": [262_144] * 2}),
    "hidden": ("all:8", "hidden:all", {"all": [32_768]}),
    "batch,hidden": (
        "r:2;c:4",
        "batch:r;hidden:c",
        {"c": [16_384], "r": [65_536] * 2},
    ),
    "batch,io": (
        "r:2;c:4",
        "batch:r;io:c",
        {"c": [65_536] * 2, "r": [65_536] * 2},
    ),
    "batch,hidden,io": (
        "r:2;c:2;p:2",
        "batch:r;hidden:c;io:p",
        {"p": [32_768] * 2, "c": [8_192], "r": [65_536] * 2},
    ),
}


@pytest.mark.parametrize("name", SIX_LAYOUTS)
def test_mtf_1_six_layouts_of_one_model(name: str) -> None:
    """The table of closed forms to the byte: all_reduces, over which mesh dim."""
    mesh, layout, expected = SIX_LAYOUTS[name]
    case, rules = f1(), autopar.LayoutRules(layout, F1_NAMES)
    step = autopar.parallelize(case.step, mesh=mesh, method=rules)
    assert traffic(step.plan(*case.args)) == {
        ("all_reduce", axis): sizes for axis, sizes in expected.items()
    }
    compiled = run_as_planned(step, *case.args)
    weights = jax.jit(case.step)(*case.args)
    updated = compiled(*jax.tree.map(jnp.copy, case.args))
    for name, value in weights.items():  # a unit in the last place of the largest
        unit = np.spacing(np.abs(value).max())
        np.testing.assert_allclose(updated[name], value, rtol=0, atol=unit)


@pytest.mark.parametrize("name", SIX_LAYOUTS)
def test_mtf_1_weights_and_activations_lie_as_the_layout_says(name: str) -> None:
    mesh, layout, _ = SIX_LAYOUTS[name]
    case, rules = f1(), autopar.LayoutRules(layout, F1_NAMES)
    plan = autopar.parallelize(case.step, mesh=mesh, method=rules).plan(*case.args)
    axes = dict(pair.split(":") for pair in layout.split(";") if pair)
    for path, dims in {"params['w']": ("io", "hidden"), "x": ("batch", "io")}.items():
        expected = [
            next((i for i, dim in enumerate(dims) if axes.get(dim) == axis), -1)
            for axis in plan.sharding.mesh.axis_names
        ]
        assert list(homes(plan)[path]) == expected


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        ("r:2;c:4", "batch:r;hidden:c"),
        ("r:2,c:4", "batch:r,hidden:c"),
        ("r:2.c:4", "batch:r.hidden:c"),
        ("r:2 c:4", "batch: r hidden:c ;"),
    ],
)
def test_mtf_1_pairs_are_separated_by_any_of_four(mesh: str, layout: str) -> None:
    case, rules = f1(), autopar.LayoutRules(layout, F1_NAMES)
    plan = autopar.parallelize(case.step, mesh=mesh, method=rules).plan(*case.args)
    assert homes(plan)["params['w']"] == (-1, 1)
    assert homes(plan)["x"] == (0, -1)


def test_mtf_1_one_tensor_with_names_names_all_that_share_its_dims() -> None:
    rules = autopar.LayoutRules("batch:r;hidden:c", {"params['w']": "io hidden"})
    case = f1()
    plan = autopar.parallelize(case.step, mesh="r:2;c:4", method=rules).plan(*case.args)
    assert homes(plan) == {
        "params['v']": (-1, 0),
        "params['w']": (-1, 1),
        "x": (0, -1),
        "y": (0, -1),
    }


def test_mtf_1_as_rules_they_leave_the_rest_to_the_solver() -> None:
    """With `batch:rows` alone it finds hidden:cols, 155,648 B, and not io:cols."""
    case = f1()
    step = autopar.parallelize(case.step, mesh="rows:2;cols:4", rules="batch:rows")
    plan = step.plan(*case.args)
    assert sent_bytes(plan) == 155_648
    assert homes(plan)["params['w']"][1] == 1
    assert homes(plan)["params['v']"][1] == 0
    run_as_planned(step, *case.args)


def test_mtf_1_a_name_may_have_two_axes() -> None:
    case = f1()
    rules = autopar.LayoutRules("batch:r;batch:c")
    step = autopar.parallelize(case.step, mesh="r:2;c:4", method=rules)
    assert traffic(step.plan(*case.args)) == {("all_reduce", "r,c"): [262_144] * 2}


def test_mtf_1_the_first_axis_of_a_name_is_the_most_major() -> None:
    """In either order; sums over both axes do not care."""
    case = f1()
    for axes in (("r", "c"), ("c", "r")):
        rules = autopar.LayoutRules(";".join(f"batch:{axis}" for axis in axes))
        step = autopar.parallelize(case.step, mesh="r:2;c:4", method=rules)
        plan = run_as_planned(step, *case.args).plan
        assert traffic(plan) == {("all_reduce", "r,c"): [262_144] * 2}
        names = plan.sharding.mesh.axis_names
        for path in ("x", "y"):
            assert to_partition_spec(homes(plan)[path], 2, names) == P(axes)


def refused(layout: str, names: dict[str, str], case: Case, mesh: str) -> str:
    """Why a layout is an error."""
    rules = autopar.LayoutRules(layout, names)
    with pytest.raises(ValueError) as caught:
        autopar.parallelize(case.step, mesh=mesh, method=rules).plan(*case.args)
    return str(caught.value)


def test_mtf_2_two_dims_of_a_tensor_on_one_mesh_dim() -> None:
    names = {"params['w']": "io hidden"}
    text = refused("hidden:x;io:x", names, f1(), "x:8")
    assert "'x' splits dims 0 and 1 of params['w'], float32[128,512]" in text
    assert "'io' of dim 0 of params['w']" in text
    assert "'hidden' of dim 1 of params['w']" in text


def test_mtf_2_a_size_that_is_not_divisible() -> None:
    text = refused("batch:x", {}, f1(batch=60), "x:8")
    assert "'batch' is split into 8 by 'batch:x'" in text
    assert "dim 0 of x, float32[60,128]" in text


def test_mtf_2_one_name_on_two_sizes_of_which_one_is_not_divisible() -> None:
    case = Case(lambda a, b: (a * 2, b * 2), (random(0, 16), random(1, 12)))
    text = refused("n:x", {"a": "n", "b": "n"}, case, "x:8")
    assert "dim 0 of b, float32[12] (and dim 0 of a, float32[16])" in text


def test_mtf_2_one_dim_on_two_mesh_dims_in_strict_mode() -> None:
    with pytest.raises(ValueError, match="'batch' is given 'r' and 'c'"):
        autopar.LayoutRules("batch:r;batch:c", strict=True)


def test_mtf_2_two_names_of_one_dim_with_different_rules() -> None:
    names = {"params['w']": "io hidden", "params['v']": "inner io"}
    text = refused("hidden:c", names, f1(), "r:2;c:4")
    assert "'inner' of dim 0 of params['v']" in text
    assert "'hidden' of dim 1 of params['w']" in text


def test_mtf_2_a_dim_that_meets_itself_is_refused_until_a_pin_ends_its_name() -> None:
    """Scores have the length twice. Mesh-TensorFlow renames one; here a pin does."""

    def scores(x: jax.Array, *, renamed: bool = False) -> jax.Array:
        memory = autopar.pin(x, P()) if renamed else x
        return x @ memory.T

    case = Case(scores, (random(0, 16, 32),))
    text = refused("length:x", {"x": "length d"}, case, "x:8")
    assert "'x' splits dims 0 and 1 of" in text and "test_mesh_tensorflow" in text
    rules = autopar.LayoutRules("length:x", {"x": "length d"})
    step = autopar.parallelize(
        lambda x: scores(x, renamed=True), mesh="x:8", method=rules
    )
    assert traffic(step.plan(*case.args)) == {("all_gather", "x"): [16 * 32 * 4]}
    run_as_planned(step, *case.args)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("batch", "name:axis pairs"),
        ("batch:x:y", "name:axis pairs"),
        ("batch:x batch:x", "must be given once"),
        ("batch:z", "may only name axes of the mesh x:8"),
        ("heads:x", "'heads' in 'heads:x' is none of batch"),
    ],
)
def test_mtf_2_rules_that_say_nothing_are_refused(layout: str, message: str) -> None:
    case = f1()
    with pytest.raises(ValueError, match=message):
        autopar.parallelize(
            case.step, mesh="x:8", method=autopar.LayoutRules(layout)
        ).plan(*case.args)


def test_mtf_2_a_name_too_few_or_for_nothing_is_refused() -> None:
    text = refused("io:x", {"params['w']": "io"}, f1(), "x:8")
    assert "one name for each dim" in text and "float32[128,512]" in text
    text = refused("io:x", {"wieght": "io hidden"}, f1(), "x:8")
    assert "'wieght' is in none of the 4" in text


def test_mtf_2_a_pin_against_a_rule_names_both() -> None:
    case = f1()
    rules = autopar.LayoutRules("hidden:c", F1_NAMES)
    step = autopar.parallelize(
        case.step, mesh="r:2;c:4", method=rules, pins={"params/w": P("c")}
    )
    with pytest.raises(ValueError, match="pinned to .c, -., which Layout.*'hidden:c'"):
        step.plan(*case.args)


KIB = 1024
RELAYOUTS = {
    "whole": (P("x"), P(), {"all_gather": [16 * KIB]}),
    "slice": (P(), P("x"), {}),
    "moved": (P("x"), P(None, "x"), {"all_to_all": [2 * KIB]}),
}
RELAYOUTS_2D = {
    "gather one": ("2x4", P("x", "y"), P(None, "y"), {"all_gather": [4 * KIB]}),
    "move one": ("2x4", P(("x", "y")), P("x", "y"), {"all_to_all": [2 * KIB]}),
    "other axis": ("2x2", P("x"), P("y"), {"collective_permute": [8 * KIB]}),
    "other longer axis": ("2x4", P("x"), P("y"), {"collective_permute": [4 * KIB]}),
    "swap": ("2x2", P("x", "y"), P("y", "x"), {"collective_permute": [4 * KIB]}),
    "swap of two sizes": (
        "2x4",
        P("x", "y"),
        P("y", "x"),
        {"all_to_all": [2 * KIB], "collective_permute": [2 * KIB]},
    ),
    "other order": (
        "2x4",
        P(("x", "y")),
        P(("y", "x")),
        {"collective_permute": [2 * KIB]},
    ),
}


def relaid(mesh: Mesh, source: P, target: P) -> dict[str, list[int]]:
    """The collectives, by kind, of 64 x 64 numbers that change their layout."""

    def step(a: jax.Array) -> jax.Array:
        return autopar.pin(autopar.pin(a, source), target)

    case = Case(step, (random(0, 64, 64),))
    compiled = run_as_planned(autopar.parallelize(step, mesh=mesh), *case.args)
    return {kind: sizes for (kind, _), sizes in traffic(compiled.plan).items()}


@pytest.mark.parametrize("name", RELAYOUTS)
def test_mtf_4_relayout_on_one_axis(mesh_1d: Mesh, name: str) -> None:
    source, target, expected = RELAYOUTS[name]
    assert relaid(mesh_1d, source, target) == expected


@pytest.mark.parametrize("name", RELAYOUTS_2D)
def test_mtf_4_relayout_on_two_axes(name: str) -> None:
    sizes, source, target, expected = RELAYOUTS_2D[name]
    rows, columns = map(int, sizes.split("x"))
    devices = np.array(jax.devices()[: rows * columns]).reshape(rows, columns)
    assert relaid(Mesh(devices, ("x", "y")), source, target) == expected


def test_names_reach_through_a_loop_over_layers() -> None:
    """Stacked kernels have one dim more outside of the loop than in it."""

    def step(layers: jax.Array, x: jax.Array) -> jax.Array:
        def loss(layers: jax.Array) -> jax.Array:
            out, _ = jax.lax.scan(lambda x, w: (jax.numpy.tanh(x @ w), None), x, layers)
            return (out**2).mean()

        return layers - 0.1 * jax.grad(loss)(layers)

    case = Case(step, (random(0, 3, 64, 64, scale=0.1), random(1, 16, 64)))
    rules = autopar.LayoutRules("batch:x")
    parallel = autopar.parallelize(step, mesh="x:8", method=rules)
    plan = run_as_planned(parallel, *case.args).plan
    assert homes(plan) == {"layers": (-1,), "x": (0,)}
    assert sum(sum(sizes) for sizes in traffic(plan).values()) == 3 * 64 * 64 * 4


def test_a_transformer_layer_by_its_rules() -> None:
    """F3 as Mesh-TensorFlow ships it: batch, heads and d_ff; four sums of (b/r) s h."""
    case = f3()
    names = {"params['qkv']": "h - heads d", "params['up']": "h d_ff"}
    rules = autopar.LayoutRules("batch:r;heads:c;d_ff:c", names)
    step = autopar.parallelize(case.step, mesh="r:2;c:4", method=rules)
    plan = run_as_planned(step, *case.args).plan
    sums = traffic(plan)
    assert sums.pop(("all_reduce", "c")) == [32_768] * 4
    params = jax.tree.leaves(case.args[0])
    gradients = [p.nbytes // (4 if p.ndim > 1 else 1) for p in params]
    assert sums == {("all_reduce", "r"): sorted(gradients, reverse=True)}
