"""The model zoo: ordinary single-device JAX training code to parallelize."""

from .registry import build as build
from .registry import names as names
from .workload import TrainState as TrainState
from .workload import Workload as Workload
