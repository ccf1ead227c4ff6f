"""Steps compiled for TPUs that are not here: two programs, audited and altered."""

from collections.abc import Callable
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

import autopar
from autopar.audit.compiled_collectives import CompiledProgram, collectives_in_compiled
from autopar.audit.hlo_text import Instruction
from autopar.errors import InfeasiblePlanError
from autopar.report.compiled_figures import CompiledFigures
from autopar.steps.lowered_step import Compiled
from benchmarks.compile_for import step_for
from benchmarks.models import build
from tests.targets.test_altered_plans import ALTERED, MORE, altered, audit_of

pytestmark = pytest.mark.targets
PLATFORM = "tpu"


def scan_products(w: jax.Array, x: jax.Array) -> jax.Array:
    return lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=3)[0]


@cache
def loop() -> Compiled:
    """A gather, an exchange and a reduce-scatter, three times."""
    arguments = (
        jax.ShapeDtypeStruct(s, jnp.float32) for s in [(8192, 8192), (8, 8192)]
    )
    pins = {"w": jax.P("y", None), "x": jax.P("x", None)}
    cluster = autopar.Cluster.preset("v5e:2x4")
    step = autopar.parallelize(
        scan_products, mesh="x:2;y:4", pins=pins, cluster=cluster
    )
    return step.lower(*arguments).compile()


@cache
def network() -> Compiled:
    """Gathers beside other work, and small ones that are sums."""
    workload = build("mlp", num_layers=2, batch_size=512)
    step = step_for(workload, "v5p:2x2x2", "Zero(3)")
    return step.lower(*workload.abstract()).compile()


def test_a_step_has_the_collectives_of_its_plan() -> None:
    found = network().audit()
    found.raise_if_wrong()
    assert found.memory is not None
    assert {each.kind for each in network().plan.sharding.collectives} == {
        *("all_gather", "reduce_scatter", "all_reduce")
    }
    assert "num_partitions=8" in network().as_text().splitlines()[0]


def cycles_of(program: CompiledProgram, name: str) -> int:
    """What the compiler estimates of a computation's fusions, loops by their trips."""
    total = 0
    for made in map(Instruction.parse, program.computations.get(name, ())):
        if made is None:
            continue
        total += made.estimated_cycles
        if made.opcode == "while":
            trips = program.trips(name, made)
            total += (trips or 1) * cycles_of(program, made.called_as("body"))
        elif made.opcode in ("call", "conditional"):
            total += max((cycles_of(program, each) for each in made.called), default=0)
    return total


def test_a_loop_is_counted_that_does_not_say_how_often_it_runs() -> None:
    loop().audit().raise_if_wrong()
    assert "known_trip_count" not in loop().as_text()
    kinds = {"all_gather", "all_to_all", "all_reduce"}  # for a small reduce_scatter
    compiled = collectives_in_compiled(loop().as_text())
    assert {each.kind for each in compiled} == kinds
    assert {each.count for each in compiled} == {3}
    program = CompiledProgram.parse(loop().as_text())
    cycles, replayed = cycles_of(program, program.entry), loop().predicted
    assert replayed is not None
    assert 0 < replayed.by_class["kernels"] <= 1.001 * cycles / 1.5e9  # of a v5e


@pytest.mark.parametrize("change", ALTERED)
@pytest.mark.parametrize("program", [loop, network])
def test_an_altered_plan_is_found(program: Callable[[], Compiled], change: str) -> None:
    plans = list(altered(program().plan.sharding.collectives, change))
    assert plans
    assert not any(audit_of(program(), planned).ok for planned in plans)


@pytest.mark.parametrize("change", MORE)
@pytest.mark.parametrize("program", [loop, network])
def test_a_program_that_sends_what_is_not_planned_is_found(
    program: Callable[[], Compiled], change: str
) -> None:
    texts = list(altered(collectives_in_compiled(program().as_text()), change))
    planned = program().plan.sharding.collectives
    assert texts
    assert not any(audit_of(program(), planned, text).ok for text in texts)


def test_a_kernel_of_the_user_s_is_split_along_its_grid() -> None:
    """JAX's flash attention by examples: no operand of it is gathered."""

    def train(w: jax.Array, x: jax.Array) -> jax.Array:
        def loss(w: jax.Array) -> jax.Array:
            q = jnp.einsum("bhtd,de->bhte", x, w)
            return jnp.mean(flash_attention(q, x, x, causal=True) ** 2)

        return w - jax.grad(loss)(w)

    shapes = (128, 128), (16, 2, 256, 128)
    arguments = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]
    cluster = autopar.Cluster.preset("v5e:2x4")
    step = autopar.parallelize(
        train, mesh="x:8", pins={"x": jax.P("x")}, cluster=cluster
    )
    compiled = step.lower(*arguments).compile()
    compiled.audit().raise_if_wrong()
    # Forward, and back for queries; those of keys and values are read by nobody.
    assert compiled.as_text().count("tpu_custom_call") == 2
    collectives = compiled.plan.sharding.collectives
    assert max(each.bytes for each in collectives) <= 128 * 128 * 2


def test_what_is_too_large_for_the_device_is_refused() -> None:
    audit = network().audit()
    assert audit.memory is not None
    held = audit.memory.device_bytes
    CompiledFigures("v5p:2x2x2", (("", audit),), 1.0, held).check_fits()
    small = CompiledFigures("v5p:2x2x2", (("", audit),), 1.0, held // 2)
    with pytest.raises(InfeasiblePlanError, match="of v5p:2x2x2, .* give memory_budge"):
        small.check_fits()
