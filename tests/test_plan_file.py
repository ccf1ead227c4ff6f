"""Plan files: what is written is read back equal, and nothing else is read at all."""

import copy
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import autopar
from autopar.errors import PlanFileError
from autopar.plans.plan_file import from_json, read_plan, to_json
from autopar.sharding.mesh import MeshShape
from autopar.steps.parallel_plan import Plan
from tests.marks import slow
from tests.rows.fixtures import f6
from tests.tiny_plans import make_plan

TEXT = to_json(make_plan())
STATE = {
    "w": jax.ShapeDtypeStruct((2, 64, 64), jnp.float32),
    "b": jax.ShapeDtypeStruct((64,), jnp.float32),
}
BATCH = jax.ShapeDtypeStruct((32, 64), jnp.float32)
CLUSTER = autopar.Cluster.preset("8xH100")


def step(state: Any, x: Any) -> Any:
    """Two layers as a scan, and a step of gradient descent."""

    def loss_of(state: Any) -> jax.Array:
        y, _ = jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, state["w"])
        return jnp.mean((y + state["b"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), loss


@pytest.fixture(scope="module")
def plan() -> Plan:
    options = {"mesh": "data:2;model:4", "cluster": CLUSTER}
    return autopar.parallelize(step, **options).plan(STATE, BATCH)


def read(document: Any) -> Any:
    return from_json(json.dumps(document), "plan.json")


def run(plan: Plan, fun: Any = step, *args: Any) -> None:
    autopar.parallelize(fun, plan=plan, cluster=CLUSTER).plan(*(args or (STATE, BATCH)))


def test_every_field_comes_back_equal(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize(
    "made",
    [
        make_plan(),
        make_plan(gap=math.inf),
        make_plan(MeshShape(("my axis:1", "my axis"), (2, 2))),
        make_plan(MeshShape(("one", "four"), (1, 4))),
    ],
    ids=["all", "unbounded gap", "odd names", "size one"],
)
def test_one_of_everything_comes_back_equal(made: Any) -> None:
    found = from_json(to_json(made), "plan.json")
    assert found == made
    # Equality of collectives leaves these out.
    for mine, other in zip(found.collectives, made.collectives, strict=True):
        assert mine.source == other.source
        assert (mine.conditional, mine.unbounded) == (
            other.conditional,
            other.unbounded,
        )


def test_it_is_strict_json_with_one_line_for_each_operator() -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    json.loads(to_json(make_plan(gap=math.inf)), parse_constant=refuse)
    (line,) = [line for line in TEXT.splitlines() if '"jvp()/tanh.0", "kind"' in line]
    assert '"operands": ["data:0"], "results": ["data:0"]' in line
    assert '"mesh": {"data": 2, "model": 2}' in TEXT
    assert '"spec": "data:0 model:sum"' in TEXT
    assert '{"kind": "all_reduce", "over": "model"' in TEXT


@given(st.integers(0, len(TEXT.rstrip()) - 1))
def test_a_truncated_file_is_refused(length: int) -> None:
    with pytest.raises(PlanFileError, match=r"plan\.json"):
        from_json(TEXT[:length], "plan.json")


@pytest.mark.parametrize(
    ("change", "field", "reason"),
    [
        ({"format": "other"}, "format", "no plan"),
        ({"version": 2}, "version", "must be 1, .* but got 2"),
        ({"mesh": {"data": 0}}, "mesh.data", "integer >= 1, but got 0"),
        ({"mesh": {}}, "mesh", "at least one axis"),
        ({"functoin": "f"}, "functoin", "unknown; did you mean function"),
        ({"trip_counts": [1]}, "outputs", "one list for each of 1 trip counts"),
        ({"outputs": [["data:0"], ["pipe:0"]]}, "outputs[1][0]", "data, model"),
        ({"outputs": [["data:0 data:1"], []]}, "outputs[0][0]", "'data' twice"),
        ({"outputs": [["data:0;model:1"], []]}, "outputs[0][0]", "must be `-` or"),
    ],
)
def test_a_wrong_field_is_named_with_the_reason(
    change: dict[str, Any], field: str, reason: str
) -> None:
    with pytest.raises(PlanFileError) as caught:
        read({**json.loads(TEXT), **change})
    assert f"plan.json: `{field}`" in str(caught.value)
    assert caught.match(reason)


@pytest.mark.parametrize(
    ("part", "index", "change", "field", "reason"),
    [
        ("inputs", 2, {"spec": "data:2"}, "inputs[2].spec", "cannot split"),
        ("inputs", 2, {"shape": [3, 8]}, "inputs[2].spec", "evenly"),
        ("inputs", 0, {"role": "stat"}, "inputs[0].role", "one of state"),
        ("tensors", 4, {"block": 2}, "tensors[4].block", "below 2"),
        ("tensors", 2, {"dtype": 3}, "tensors[2].dtype", "must be a string"),
        ("operators", 1, {"split": True}, "operators[1].split", "integer"),
        ("collectives", 0, {"kind": "all_sum"}, "collectives[0].kind", "one of"),
        ("collectives", 0, {"over": "pipe"}, "collectives[0].over", "axes of"),
        ("collectives", 0, {"over": [[0, 4]]}, "collectives[0].over[0][1]", "below 4"),
        ("collectives", 2, {"over": [[0]]}, "collectives[2].over", "pairs"),
    ],
)
def test_a_wrong_entry_is_named_with_the_reason(
    part: str, index: int, change: dict[str, Any], field: str, reason: str
) -> None:
    document = json.loads(TEXT)
    document[part][index].update(change)
    with pytest.raises(PlanFileError) as caught:
        read(document)
    assert f"plan.json: `{field}`" in str(caught.value)
    assert caught.match(reason)


def test_a_copy_must_be_made_from_a_spec_that_is_there() -> None:
    document = json.loads(TEXT)
    document["tensors"][4]["copies"].reverse()
    with pytest.raises(PlanFileError, match=r"`tensors\[4\].copies\[0\].from`"):
        read(document)


@pytest.mark.parametrize(
    "value",
    [
        *(None, -1, "x", [[]], {}),
        *(slow(each) for each in (2.5, True, "", [])),
    ],
)
def test_whatever_one_value_becomes_the_file_is_read_or_refused(value: Any) -> None:
    document = json.loads(TEXT)
    for holder, key in list(_places(document)):
        kept = copy.deepcopy(holder[key])
        holder[key] = value
        try:
            read(document)
        except PlanFileError as error:
            assert str(error).startswith("plan.json: `")
        holder[key] = kept


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every list or object in a document, with each of its keys."""
    keys = value if isinstance(value, dict) else range(len(value))
    for key in list(keys):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


def test_a_plan_that_was_saved_runs_its_step(plan: Plan) -> None:
    run(Plan(from_json(to_json(plan.sharding), "plan.json")))


def test_a_plan_for_other_shapes_is_refused(plan: Plan) -> None:
    wider = jax.ShapeDtypeStruct((48, 64), jnp.float32)
    with pytest.raises(
        PlanFileError, match=r"input 2 is 'x \[32, 64\]', and in the st"
    ):
        run(plan, step, STATE, wider)


def test_a_plan_for_other_dtypes_is_refused(plan: Plan) -> None:
    halves = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.bfloat16), STATE)
    with pytest.raises(PlanFileError, match=r"tensor 0 is .*float32.*bfloat16"):
        run(plan, step, halves, BATCH)


def test_a_plan_of_another_function_is_refused(plan: Plan) -> None:
    def other(state: Any, x: Any) -> Any:
        return state, jnp.sum(x)

    with pytest.raises(PlanFileError, match="the plan of 'step' must fit .* 'other'"):
        run(plan, other)


@pytest.mark.parametrize(
    ("part", "key", "value", "reason"),
    [
        ("operators", "factors", ["z9", "-"], "needs one of the factors"),
        ("operators", "factors", ["-", "-"], "do not follow from its factors"),
        ("operators", "operands", ["data:1", "model:0"], "not made or copied in"),
        ("operators", "results", ["model:0"], "in another spec"),
        ("tensors", "spec", "model:0", "in another spec"),
    ],
)
def test_an_edit_that_contradicts_the_rest_is_refused(
    plan: Plan, part: str, key: str, value: Any, reason: str
) -> None:
    document = json.loads(to_json(plan.sharding))
    named = (e for e in document[part] if e["name"].endswith("/dot_general.0"))
    entry = next(named)
    assert entry[key] != value
    entry[key] = value
    with pytest.raises(PlanFileError, match=reason):
        run(Plan(from_json(json.dumps(document), "plan.json")))


@pytest.fixture(scope="module")
def staged_text() -> str:
    """A pipeline of two stages, of which two programs are enough."""
    case = f6()
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=8)
    plan = autopar.parallelize(case.step, method=method).plan(*case.args).stages
    return to_json(replace(plan, programs=plan.programs[:2]))


def test_a_pipeline_comes_back_equal(staged_text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(staged_text)
    plan = Plan.load(tmp_path / "plan.json")
    assert to_json(plan.stages) == staged_text


@pytest.mark.parametrize("part", [0.0, 0.01, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_pipeline_is_refused(
    staged_text: str, part: float, tmp_path: Path
) -> None:
    length = int(part * len(staged_text.rstrip()))
    (tmp_path / "plan.json").write_text(staged_text[:length])
    with pytest.raises(PlanFileError, match=r"plan\.json"):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": 2}, "`version` must be 1, .* but got 2"),
        ({"num_stages": 1}, "`num_stages` must be an integer >= 2"),
        ({"meshes": []}, "`meshes` must have a mesh for each of 2 stages"),
        ({"microbatch_semantics": "some"}, "must be one of exact, independent"),
        ({"stages": 2}, "`stages` is unknown"),
        ({"programs": [{"stage": 0}]}, r"`programs\[0\].kind` is missing"),
        ({"transfers": [{"slot": "x"}]}, r"`transfers\[0\].source` is missing"),
    ],
)
def test_a_wrong_field_of_a_pipeline_is_named(
    staged_text: str, change: dict[str, Any], reason: str
) -> None:
    document = {**json.loads(staged_text), **change}
    with pytest.raises(PlanFileError, match=reason):
        read_plan(json.dumps(document), "plan.json")


@pytest.mark.parametrize("value", [None, -1, 2.5, True, "x", [], {}])
def test_whatever_a_value_of_a_pipeline_becomes_it_is_read_or_refused(
    staged_text: str, value: Any
) -> None:
    document = json.loads(staged_text)
    program = document["programs"][0]
    places = [
        *((document, key) for key in document),
        *((program, key) for key in program),
        *((document["transfers"][0], key) for key in document["transfers"][0]),
    ]
    for holder, key in places:
        kept = holder[key]
        holder[key] = value
        try:
            read_plan(json.dumps(document), "plan.json")
        except PlanFileError as error:
            assert str(error).startswith("plan.json: `")
        holder[key] = kept


def test_a_plan_on_another_mesh_is_refused(plan: Plan) -> None:
    with pytest.raises(ValueError, match="made for, which is data:2;model:4, but"):
        autopar.parallelize(step, plan=plan, mesh="data:4;model:2")
    for mesh in ("data:2;model:4", {"data": 2, "model": -1}):
        autopar.parallelize(step, plan=plan, mesh=mesh, cluster=CLUSTER)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("pipe:0", "axes of the mesh"),
        ("data:0 data:1", "'data' twice"),
        ("data:1", r"cannot split the shape \[2, 64, 63\]"),
    ],
)
def test_a_hand_edit_that_is_no_legal_spec_is_refused(
    plan: Plan, spec: str, reason: str, tmp_path: Path
) -> None:
    document = json.loads(to_json(plan.sharding))
    (entry,) = [each for each in document["inputs"] if each["path"] == "state['w']"]
    if "63" in reason:
        entry["shape"], spec = [2, 64, 63], "data:2"
    entry["spec"] = spec
    (tmp_path / "plan.json").write_text(json.dumps(document))
    with pytest.raises(PlanFileError, match=reason):
        Plan.load(tmp_path / "plan.json")


def test_a_plan_with_an_array_of_no_elements_is_read_again(tmp_path: Path) -> None:
    def step(rates: jax.Array, values: jax.Array) -> jax.Array:
        def joined(first: Any, second: Any) -> Any:
            return first[0] * second[0], second[0] * first[1] + second[1]

        return jax.lax.associative_scan(joined, (rates, values), axis=1)[1]

    of = jax.ShapeDtypeStruct((8, 32, 4), jnp.float32)
    plan = autopar.parallelize(step, mesh="x:8").plan(of, of)
    assert any(0 in tensor.shape for tensor in traced_types(step, of, of))
    plan.save(tmp_path / "plan.json")
    assert autopar.Plan.load(tmp_path / "plan.json").sharding == plan.sharding


def traced_types(step: Any, *args: Any) -> list[Any]:
    jaxpr = jax.make_jaxpr(step)(*args)
    return [var.aval for eqn in jaxpr.eqns for var in eqn.outvars]
