"""A hand-made plan with one of everything, for tests of what reads and prints plans."""

from autopar.plans.explain import as_text, plan_parts
from autopar.plans.plan import (
    Conversion,
    InputPlan,
    OperatorPlan,
    Prediction,
    ShardingPlan,
    TensorPlan,
)
from autopar.plans.plan_view import Decision
from autopar.sharding.collective import Collective
from autopar.sharding.mesh import MeshShape
from autopar.sharding.spec import REPLICATED, SUM

MESH = MeshShape(("data", "model"), (2, 2))
WHOLE = (REPLICATED, REPLICATED)


def make_plan(mesh: MeshShape = MESH, gap: float = 0.001) -> ShardingPlan:
    """Two layers `x @ w`, as a scan; x by rows, w by columns, and a pending sum."""
    line = "/far/model.py:7:11 (step.<locals>.layer)"
    rows, columns, pending = (0, REPLICATED), (REPLICATED, 2), (0, SUM)
    return ShardingPlan(
        function="step",
        mesh=mesh,
        cluster="1x4xA100",
        inputs=(
            InputPlan("params['layer_0']['w']", "state", columns, (2, 8, 8), 256),
            InputPlan("params['layer_1']['w']", "state", columns, (2, 8, 8), 256),
            InputPlan("x", "batch", rows, (4, 8), 64),
        ),
        operators=(
            OperatorPlan("scan.0", "scan", line, (), (WHOLE,), (WHOLE,), 0.0, 1, 0.0),
            OperatorPlan(
                "jvp()/dot_general.0",
                "dot_general",
                line,
                ("m0", "k0"),
                (rows, (REPLICATED, 0)),
                (pending,),
                4096.0,
                4,
                3e-6,
            ),
            OperatorPlan(
                "jvp()/tanh.0",
                "tanh",
                line,
                ("d0", "-"),
                (rows,),
                (rows,),
                64.0,
                2,
                1e-6,
            ),
        ),
        tensors=(
            TensorPlan("params['layer_0']['w']", (2, 8, 8), "float32", 0, columns),
            TensorPlan("params['layer_1']['w']", (2, 8, 8), "float32", 0, columns),
            TensorPlan("x", (4, 8), "float32", 0, rows),
            TensorPlan("scan.0", (4, 8), "float32", 0, WHOLE),
            TensorPlan(
                "jvp()/dot_general.0",
                (4, 8),
                "float32",
                1,
                pending,
                (Conversion(pending, rows), Conversion(rows, (0, 1))),
            ),
            TensorPlan("jvp()/tanh.0", (4, 8), "float32", 1, rows),
        ),
        outputs=((WHOLE,), (rows, pending)),
        trip_counts=(1, 2),
        collectives=(
            Collective(
                "all_reduce",
                ((0, 1), (2, 3)),
                "float32",
                64,
                2,
                "sum",
                f"jvp()/dot_general.0 {line}",
            ),
            Collective("all_gather", ((0, 1, 2, 3),), "float32", 128, source="x"),
            Collective(
                "collective_permute",
                ((0, 1), (1, 0)),
                "bfloat16",
                32,
                conditional=True,
                unbounded=True,
            ),
        ),
        predicted=Prediction(
            step_seconds=5e-6,
            compute_seconds=4e-6,
            collective_seconds=1e-6,
            collective_bytes=288,
            peak_bytes=2048,
            bubble_fraction=0.0,
            optimality_gap=gap,
            split_flops_fraction=1.0,
        ),
    )


def format_plan(plan: Decision, *, operators: bool = False) -> str:
    """What is printed of a plan."""
    return as_text(plan_parts(plan, operators))
