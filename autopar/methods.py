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
    """Inter-operator parallelism: stages on submeshes, a microbatch after the other.

    Args:
      num_stages: into how many parts the layers are cut; the devices are dealt out
        evenly, and `mesh` is the shape of one stage's part.
      num_microbatches: how many parts of the batch follow each other.
      schedule: "1f1b" or "gpipe".
    """

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
        _check_pipeline(method)
    return method


SCHEDULES = ("1f1b", "gpipe")


def _check_pipeline(method: PipelineParallel) -> None:
    if method.num_stages is None:
        raise NotImplementedError(
            "The number of stages is not searched for yet (docs/roadmap.md); give it: "
            "autopar.PipelineParallel(num_stages=2, num_microbatches=8)."
        )
    for name in ("num_stages", "num_microbatches"):
        number = getattr(method, name)
        if number is not None and (not isinstance(number, int) or number < 1):
            raise ValueError(
                f"`{name}` must be a whole number from 1 up, but got {number!r}."
            )
    if method.schedule not in SCHEDULES:
        raise ValueError(
            f"`schedule` must be one of {', '.join(SCHEDULES)}, but got "
            f"{method.schedule!r}."
        )
