"""The model zoo: ordinary single-device JAX training code to parallelize."""

from benchmarks.models.registry import build as build
from benchmarks.models.registry import names as names
from benchmarks.models.workload import TrainState as TrainState
from benchmarks.models.workload import Workload as Workload
