"""What the backward pass of a step keeps of the forward pass."""

from autopar.graph.op_graph import OpGraph
from autopar.graph.phases import Phases, read_by


def residual_bytes(graph: OpGraph) -> int:
    """Bytes that the backward pass reads and did not make, all devices together.

    As `jax.ad_checkpoint.print_saved_residuals` lists them: arguments are among them.
    """
    block = graph.blocks[0]
    phases = Phases.of(block)
    kept = set(block.inputs) | {t for op in phases.forward for t in op.results}
    read = set(read_by(phases.backward))
    return sum(graph.tensors[t].type.bytes for t in kept & read)
