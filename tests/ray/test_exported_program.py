"""Programs as bytes: made without devices, and equal to what they were made from."""

import pickle
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.api import parallelize
from autopar.clusters.cluster import Cluster, RayHosts
from autopar.costs.resharding import Resharder
from autopar.graph.effects import refuse_callbacks
from autopar.lowering.device_mesh import device_mesh, stage_meshes, submesh_of
from autopar.lowering.exported_program import export_program, plain_array, with_keys
from autopar.lowering.programs import build_program
from autopar.options import check_options
from autopar.planner.planning import plan_step
from autopar.runtime.ray_job import cut_for_hosts
from autopar.runtime.ray_programs import compile_code, place
from autopar.sharding.mesh import MeshShape

ELSEWHERE = RayHosts("10.0.0.1:6379", "cpu", 600.0)


def remote_cluster() -> Cluster:
    return replace(Cluster.preset("2x4xCPU"), ray_hosts=ELSEWHERE)


def exported(fun: Any, *args: Any, mesh: str) -> Any:
    """`fun` planned for hosts elsewhere, as bytes that went through a pickle."""
    options = check_options(mesh=mesh, cluster=remote_cluster())
    planned = plan_step(fun, args, {}, options)
    sharding = planned.plan
    program = build_program(
        planned.graph,
        sharding,
        Resharder(sharding.mesh, planned.cluster),
        device_mesh(sharding.mesh, None, planned.cluster),
        planned.argument_types,
        planned.traced.jaxpr.consts,
        (0,),
    )
    code = pickle.loads(pickle.dumps(export_program(program, "cpu")))
    return code, program.constants


def test_the_same_program_has_the_same_bytes_whoever_exports_it() -> None:
    def step(x: Any) -> Any:
        return jnp.tanh(x) * 2.0

    def further_in() -> Any:
        return exported(step, jnp.ones((8, 16)), mesh="x:8")[0]

    here = exported(step, jnp.ones((8, 16)), mesh="x:8")[0]
    assert here.digest == further_in().digest


def run(code: Any, constants: Any, args: tuple[Any, ...]) -> list[Any]:
    """The program on the devices of this process, with donated inputs."""
    here = [
        place(cut_for_hosts(plain_array(x), t, 1)[0], t)
        for x, t in zip(args, code.inputs, strict=True)
    ]
    held = [
        place(cut_for_hosts(plain_array(x), t, 1)[0], t)
        for x, t in zip(constants, code.constants, strict=True)
    ]
    outputs = compile_code(code, held)(here)
    assert here[0].is_deleted(), "donation is asked for again"
    for output, type_ in zip(outputs, code.outputs, strict=True):
        assert (output.shape, output.dtype.name) == (type_.shape, type_.dtype)
    return [with_keys(x, t) for x, t in zip(outputs, code.outputs, strict=True)]


def test_a_step_is_lowered_without_devices_and_equals_jit():
    scale = jnp.linspace(0.5, 1.5, 32)

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, grad = jax.value_and_grad(lambda w: jnp.tanh(x @ w * scale).mean())(w)
        return w - 0.1 * grad, loss

    rng = np.random.default_rng(0)
    args = rng.standard_normal((64, 32), np.float32), np.ones((16, 64), np.float32)
    code, constants = exported(step, *args, mesh="data:2;model:4")
    assert len(constants) == 1
    assert "all-reduce-combiner" in code.compiler_options["xla_disable_hlo_passes"]
    for got, expected in zip(
        run(code, constants, args), jax.jit(step)(*args), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_what_the_host_keeps_comes_from_there_and_goes_back():
    def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        w, moment = state
        loss, grad = jax.value_and_grad(lambda w: jnp.tanh(x @ w).mean())(w)
        moment = 0.9 * moment + grad
        return (w - 0.1 * moment, moment), loss

    w = np.linspace(-1, 1, 64 * 32, dtype=np.float32).reshape(64, 32)
    state, x = (w, 2 * w), np.ones((16, 64), np.float32)
    offload = "optimizer_state"
    parallel = parallelize(
        step, cluster=remote_cluster(), mesh="data:2;model:4", offload=offload
    )
    lowered: Any = parallel.lower(state, x)
    code = export_program(lowered.program, "cpu")
    assert [each.memory for each in code.inputs] == ["", "pinned_host", ""]
    given = [*state, x]
    cut = [cut_for_hosts(a, t, 1)[0] for a, t in zip(given, code.inputs, strict=True)]
    outputs = compile_code(code, ())([*map(place, cut, code.inputs)])
    kinds = [each.sharding.memory_kind for each in outputs]
    assert kinds == ["device", "pinned_host", "device"]
    expected = jax.tree.leaves(jax.jit(step)(state, x))
    for got, wanted in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_bytes_that_were_altered_are_refused():
    args = np.ones((16, 8), np.float32), np.ones((8,), np.float32)
    code, constants = exported(lambda x, y: (2 * x, x @ y), *args, mesh="x:8")
    altered = bytearray(code.code)
    altered[len(altered) // 2] ^= 1
    with pytest.raises(ValueError, match="runs as it was exported.*SHA-256"):
        compile_code(replace(code, code=bytes(altered)), constants)


def test_random_keys_pass_as_their_data():
    def step(key: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        key, now = jax.random.split(key)
        return key, x + jax.random.uniform(now, x.shape)

    args = jax.random.key(1), np.zeros((8, 4), np.float32)
    code, constants = exported(step, *args, mesh="x:8")
    key, x = run(code, constants, args)
    expected = jax.jit(step)(*args)
    assert jax.random.key_data(key).tolist() == (
        jax.random.key_data(expected[0]).tolist()
    )
    np.testing.assert_array_equal(x, expected[1])


@pytest.mark.parametrize("kind", ["print", "pure_callback", "in a scan"])
def test_host_callbacks_are_refused_with_their_line(kind: str):
    def double(x: Any) -> Any:
        return 2 * np.asarray(x)

    def fun(x: jax.Array) -> jax.Array:
        if kind == "print":
            jax.debug.print("{}", x)
        if kind == "pure_callback":
            return jax.pure_callback(double, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        if kind == "in a scan":

            def body(carry: jax.Array, _: Any) -> tuple[jax.Array, None]:
                jax.debug.print("{}", carry.sum())
                return carry + 1, None

            return jax.lax.scan(body, x, None, 3)[0]
        return x

    from autopar.frontend.tracing import trace
    from autopar.graph.build_graph import build_graph
    from autopar.planner.whole_step import roles_of

    traced = trace(fun, (np.ones(8, np.float32),), {})
    with pytest.raises(NotImplementedError, match=r"test_exported_program\.py:\d+"):
        refuse_callbacks(build_graph(traced, roles_of(traced)))


def test_meshes_of_other_hosts_have_no_devices_and_differ_by_stage():
    shapes = [MeshShape(("x",), (size,)) for size in (4, 2, 2)]
    meshes = stage_meshes(shapes, remote_cluster())
    assert len(set(meshes)) == 3
    assert [submesh_of(mesh) for mesh in meshes] == [(i, (4, 2, 2)) for i in range(3)]


def test_a_step_for_other_hosts_is_planned_anywhere():
    step = parallelize(lambda x: x.sum(), cluster=remote_cluster(), mesh="x:8")
    plan = step.plan(jax.ShapeDtypeStruct((64,), jnp.float32))
    assert plan.sharding.mesh.size == 8


def test_a_program_of_other_hosts_is_audited_where_devices_stand_in():
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, grad = jax.value_and_grad(lambda w: jnp.tanh(x @ w).mean())(w)
        return w - 0.1 * grad, loss

    parallel = parallelize(step, cluster=remote_cluster(), mesh="x:8")
    w, x = (jax.ShapeDtypeStruct((n, 512), jnp.float32) for n in (512, 4096))
    lowered = parallel.lower(w, x)
    assert lowered.compile().audit().ok
