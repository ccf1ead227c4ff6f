"""The public names, and where they are from; see `__init__.py`."""

from .adascale_gain import AdaScaleState as AdaScaleState
from .adascale_gain import adascale as adascale
from .adascale_gain import grouped_value_and_grad as grouped_value_and_grad
from .api import ParallelFunction as ParallelFunction
from .api import parallelize as parallelize
from .clusters.cluster import Cluster as Cluster
from .comparison import Comparison as Comparison
from .comparison import compare as compare
from .data.batches import Batches as Batches
from .errors import AuditError as AuditError
from .errors import AutoparError as AutoparError
from .errors import CheckpointError as CheckpointError
from .errors import FallbackWarning as FallbackWarning
from .errors import HostLostError as HostLostError
from .errors import InfeasiblePlanError as InfeasiblePlanError
from .errors import PlanFileError as PlanFileError
from .methods.layout_rules import LayoutRules as LayoutRules
from .methods.methods import Auto as Auto
from .methods.methods import PipelineParallel as PipelineParallel
from .methods.methods import ShardParallel as ShardParallel
from .methods.named_methods import DataParallel as DataParallel
from .methods.named_methods import Megatron as Megatron
from .methods.named_methods import ThreeD as ThreeD
from .methods.named_methods import Zero as Zero
from .methods.place_operators import PlaceOperators as PlaceOperators
from .microbatches.microbatches import BatchCoupledError as BatchCoupledError
from .rules.custom import register_rule as register_rule
from .sharding import layouts as layouts
from .sharding.layouts import FREE as FREE
from .sharding.pin_primitive import pin as pin
from .sharding.relayout import relayout as relayout
from .sharding.relayout import relayout_like as relayout_like
from .state.distributed_array import (
    AbstractDistributedArray as AbstractDistributedArray,
)
from .state.distributed_array import DistributedArray as DistributedArray
from .state.distributed_array import fetch as fetch
from .state.memmap_store import MemmapStore as MemmapStore
from .steps.execution import Checkpoint as Checkpoint
from .steps.execution import Checkpoints as Checkpoints
from .steps.execution import export_weights as export_weights
from .steps.execution import restore as restore
from .steps.execution import save as save
from .steps.parallel_plan import Plan as Plan
from .training import Recovery as Recovery
from .training import Training as Training
