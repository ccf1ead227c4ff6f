"""Where the programs of a Ray cluster run, and how long its hosts are waited for."""

from dataclasses import dataclass
from typing import Literal, get_args

from autopar.clusters.hardware import check_positive

_MOST = 9  # steps under way: each holds its batch on the hosts
OnFailure = Literal["replan", "wait", "raise"]


@dataclass(frozen=True)
class RayHosts:
    """Where a cluster's programs run: on the hosts of a running Ray cluster.

    Attributes:
      address: the Ray cluster's.
      platform: `cpu`, `gpu` or `tpu`.
      step_seconds: how long a step may take before its hosts are given up.
      silent_seconds: without a sign of life for so long, a host is given up.
      on_failure: what `autopar.Training` does when a host is lost.
      wait_seconds: how long it waits for hosts.
      steps_ahead: how many steps may be under way when a call returns.

    Raises:
      ValueError: a time is not above 0, `on_failure` is none of those, or `steps_ahead`
        is below 0.
    """

    address: str
    platform: str
    step_seconds: float
    silent_seconds: float = 8.0
    on_failure: OnFailure = "replan"
    wait_seconds: float = 600.0
    steps_ahead: int = 0

    def __post_init__(self) -> None:
        check_positive("step_seconds", self.step_seconds)
        check_positive("silent_seconds", self.silent_seconds)
        check_positive("wait_seconds", self.wait_seconds)
        if isinstance(self.steps_ahead, bool) or self.steps_ahead not in range(_MOST):
            raise ValueError(
                f"`steps_ahead` must be a number from 0 to {_MOST - 1}, but got "
                f"{self.steps_ahead!r}."
            )
        if self.on_failure not in get_args(OnFailure):
            raise ValueError(
                f"`on_failure` must be 'replan', 'wait' or 'raise', but got "
                f"{self.on_failure!r}."
            )

    @property
    def lowering_platform(self) -> str:
        """What jax calls the platform where it lowers for it."""
        return {"gpu": "cuda"}.get(self.platform, self.platform)
