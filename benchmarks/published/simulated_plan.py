"""What is simulated: a plan, and how the system that runs it works."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.published.schedules import ONE_F_ONE_B
from benchmarks.published.unit_costs import Layout


@dataclass(frozen=True)
class System:
    """How a system runs what it is given.

    Attributes:
      splits_state: the optimizer's state is split over `data` too (ZeRO).
      reduces_always: gradients are reduced after every microbatch, not once a step, and
        each device keeps its share of them (ZeRO-2).
      has_equal_stages: stages have equally many layers, not equal seconds.
      balances_flops: stages have equal forward flops a device, not equal seconds: Alpa
        clusters operators into layers so (OSDI 2022, section 5.2), and stages are made
        of these.
      kept_bytes: of optimizer state for a parameter beside the model's own.
      update_bytes: of what its update makes for a parameter, once activations are gone.
      has_one_group: experts route all examples that a device has at once, so that the
        masks of tokens by slots grow with their square.
      gate_bytes: of the masks that its gate holds at once, for a token and a slot.
      has_largest_microbatch: it runs the largest microbatches that fit.
    """

    splits_state: bool = True
    reduces_always: bool = False
    has_equal_stages: bool = False
    balances_flops: bool = False
    kept_bytes: int = 0
    update_bytes: int = 0
    has_one_group: bool = False
    gate_bytes: int = 0
    has_largest_microbatch: bool = False


@dataclass(frozen=True)
class Plan:
    """Layouts of the submeshes, in order, and the number of microbatches.

    A submesh has one stage, or `num_chunks` of an interleaved schedule.
    """

    layouts: tuple[Layout, ...]
    num_microbatches: int
    system: System = System()
    remat: bool = True
    schedule: str = ONE_F_ONE_B
    num_chunks: int = 1

    @property
    def stages(self) -> tuple[Layout, ...]:
        """The layout of each stage."""
        return self.layouts * self.num_chunks

    def __str__(self) -> str:
        kinds: list[list[object]] = []
        for layout in self.layouts:
            if kinds and kinds[-1][1] == layout:
                kinds[-1][0] = int(str(kinds[-1][0])) + 1
            else:
                kinds.append([1, layout])
        stages = " + ".join(f"{count}x{layout}" for count, layout in kinds)
        chunks = f" of {self.num_chunks} stages each" if self.num_chunks > 1 else ""
        schedule = "" if self.schedule == ONE_F_ONE_B else f", {self.schedule}{chunks}"
        remat = "" if self.remat else ", nothing recomputed"
        return f"{stages}, {self.num_microbatches} microbatches{schedule}{remat}"
