"""Methods: what kinds of parallelism a plan may use. The solver does the rest."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Auto:
    """Search everything there is; today that is intra-operator parallelism."""


@dataclass(frozen=True)
class ShardParallel:
    """Intra-operator parallelism: every operator is split over the whole mesh.

    Args:
      num_microbatches: how many parts of the batch are run one after the other.
    """

    num_microbatches: int = 1


@dataclass(frozen=True)
class PipelineParallel:
    """Inter-operator parallelism: stages on submeshes (planned, not there yet)."""

    num_stages: int | None = None
    num_microbatches: int | None = None
    schedule: str = "1f1b"


Method = Auto | ShardParallel | PipelineParallel
METHODS = (Auto, ShardParallel, PipelineParallel)


def check_method(method: object) -> Method:
    """The method, or a TypeError that says what could be given.

    Raises NotImplementedError for what is on the roadmap.
    """
    if method is None:
        return Auto()
    if isinstance(method, type) and issubclass(method, METHODS):
        raise TypeError(
            f"`method` must be an instance, but got the class {method.__name__}; write "
            f"{method.__name__}()."
        )
    if not isinstance(method, METHODS):
        names = ", ".join(f"autopar.{kind.__name__}()" for kind in METHODS)
        raise TypeError(
            f"`method` must be one of {names} or None, but got {method!r} of type "
            f"{type(method).__name__}."
        )
    if isinstance(method, PipelineParallel):
        raise NotImplementedError(
            "Pipeline stages are not there yet (docs/roadmap.md); use "
            "autopar.ShardParallel() or leave `method` out."
        )
    return method
