"""What the command line asks of a suite, and the cases that a suite is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.models import names
from benchmarks.models.names import look_up
from benchmarks.results import Result

if TYPE_CHECKING:
    from autopar.clusters.cluster import Cluster
    from benchmarks.targets import BenchStep

_TINY = ("mlp", "gpt", "moe")
_MODELS = ("mlp", "gpt", "llama", "bert", "t5", "moe", "lstm", "vit", "resnet", "unet")


@dataclass(frozen=True)
class Case:
    """One measurement to come; `measure` yields what it finds."""

    name: str
    measure: Callable[[], Iterable[Result]]


@dataclass(frozen=True)
class Request:
    """What is asked of a suite; None and nothing are the suite's own choice.

    What only a clock tells is left out unless `is_timed`: calls, and a Ray cluster, for
    which steps are planned only.

    Attributes:
      small: toy sizes, seconds a suite.
      targets: models by name, and steps of one's own as `MODULE:NAME`.
      args: `MODULE:NAME` of the example arguments of a step of one's own.
      settings: options of the models, by name.
      meshes: axes such as `x:2;y:4`.
      cluster: a preset by name or a cluster file by path; if None, the devices here.
      methods: as they are written in Python, `Zero(stage=3)`.
      options: more of `autopar.parallelize`, by name.
      tables: published tables.
      rounds: timed rounds of each case.
      num_devices: how many devices are here.

    Raises:
      ValueError: an unknown model, method or cluster, with the nearest name; meshes of
        other devices; no round.
    """

    small: bool = False
    targets: tuple[str, ...] | None = None
    args: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    meshes: tuple[str, ...] | None = None
    cluster: str | None = None
    methods: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    tables: tuple[Path, ...] = ()
    rounds: int | None = None
    num_devices: int = 8
    is_timed: bool = True

    def __post_init__(self) -> None:
        known = {name: name for name in names()}
        for name in self.targets or ():
            if ":" not in name:
                look_up("model", name, known)
        if self.args is not None and len(self.targets or ()) != 1:
            raise ValueError(
                f"--args are the example arguments of one step, but "
                f"{len(self.targets or ())} steps or models are named; name the one."
            )
        if self.settings and not self.targets:
            raise ValueError(
                f"--set is for models that are named, but none is and got "
                f"{', '.join(self.settings)}; name a model, such as gpt."
            )
        if self.rounds is not None and self.rounds < 1:
            raise ValueError(
                f"--rounds must be 1 or more, but got {self.rounds}; 20 is a good "
                f"number."
            )
        self._check_places()

    def _check_places(self) -> None:
        from autopar.commands.plan_targets import parse_method
        from autopar.sharding.mesh import parse_mesh

        where = self.place
        number = self.num_devices if where is None else where.num_devices
        for mesh in self.meshes or ():
            parse_mesh(mesh, number)
        for method in self.methods:
            parse_method(method)

    @cached_property
    def place(self) -> Cluster | None:
        """The cluster that plans are for; None for the devices here."""
        from autopar.commands.plan_command import find_cluster

        return find_cluster(self.cluster)

    @cached_property
    def _found(self) -> dict[str, BenchStep]:
        return {}

    def names(self) -> tuple[str, ...]:
        """What is run: a few models of each kind, if nothing is named."""
        return self.targets or (_TINY if self.small else _MODELS)

    def first(self) -> Request:
        """For suites whose small runs take one model."""
        if self.targets or not self.small:
            return self
        return replace(self, targets=("mlp",))

    def find(self, name: str) -> BenchStep:
        """The step that a name stands for.

        Raises:
          TypeError, ValueError: as `benchmarks.targets.find_target`.
        """
        if name not in self._found:
            from benchmarks.targets import find_target

            self._found[name] = find_target(name, self.args, self.settings)
        return self._found[name]

    def cases(self) -> Iterator[tuple[str, str]]:
        """Name and mesh of each case; small runs take the first mesh."""
        meshes = self.meshes or self._own_meshes()
        for name in self.names():
            for mesh in meshes:
                yield name, mesh

    def _own_meshes(self) -> tuple[str, ...]:
        number = self.num_devices
        one = f"x:{number}"
        if self.small or number < 4 or number % 2:
            return (one,)
        return one, f"x:2;y:{number // 2}"
