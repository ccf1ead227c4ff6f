"""The logical mesh: named axes and their sizes, without devices and without jax."""

import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeGuard, cast

import numpy as np

_DEFAULT_NAMES = ("x", "y", "z")
_SEPARATORS = re.compile(r"[;,.\s]+")


class NamedMesh(Protocol):
    """What `jax.sharding.Mesh` and `AbstractMesh` have in common."""

    @property
    def axis_names(self) -> tuple[Any, ...]: ...

    @property
    def shape(self) -> Any: ...  # A mapping of names to sizes; jax leaves it untyped.


@dataclass(frozen=True)
class MeshShape:
    """Names and sizes of mesh axes; devices are numbered row-major over them.

    Prints as the string that `parse_mesh` reads: `data:2;model:4`.

    Attributes:
      axis_names: one distinct name for each axis, major first.
      axis_sizes: number of devices along each axis, in the same order.

    Raises:
      ValueError: no axis, an empty or repeated name, or a size below one.
    """

    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.axis_names:
            raise ValueError(
                "a mesh needs at least one axis, but got none; "
                "for a single device write 'x:1'."
            )
        if len(self.axis_names) != len(self.axis_sizes):
            raise ValueError(
                f"a mesh needs one size for each axis name, but got the names "
                f"{self.axis_names} and the sizes {self.axis_sizes}."
            )
        for name in self.axis_names:
            if not isinstance(name, str) or not name:
                raise ValueError(
                    f"a mesh axis name must be a non-empty string, but got {name!r}."
                )
            if self.axis_names.count(name) > 1:
                raise ValueError(
                    f"mesh axis names must be distinct, but {name!r} occurs "
                    f"{self.axis_names.count(name)} times in {self.axis_names}; "
                    "rename one of them."
                )
        for name, size in zip(self.axis_names, self.axis_sizes, strict=True):
            if size < 1:
                raise ValueError(
                    f"a mesh axis must have size 1 or more, but {name!r} has {size}; "
                    "use -1 in `parse_mesh` to fill it from the number of devices."
                )

    @property
    def size(self) -> int:
        """Number of devices: the product of the axis sizes."""
        return math.prod(self.axis_sizes)

    @property
    def num_axes(self) -> int:
        """Number of axes."""
        return len(self.axis_names)

    def index_of(self, name: str) -> int:
        """The position of an axis.

        Raises:
          ValueError: the mesh has no axis of that name.
        """
        if name not in self.axis_names:
            raise ValueError(
                f"a mesh axis must be one of {', '.join(self.axis_names)}, "
                f"but got {name!r}."
            )
        return self.axis_names.index(name)

    def size_of(self, name: str) -> int:
        """Number of devices along an axis; errors as `index_of`."""
        return self.axis_sizes[self.index_of(name)]

    def device_ids(self) -> np.ndarray:
        """Device numbers 0, 1, ... in row-major order, shaped `axis_sizes`."""
        return np.arange(self.size).reshape(self.axis_sizes)

    def groups(self, axes: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """The replica groups of a collective over some axes.

        Args:
          axes: names of the axes that the collective runs over, in any order.

        Returns:
          Groups of device numbers. Within a group devices follow the mesh's axis order,
          the last axis fastest; groups follow the other axes in row-major order. No
          axes give one group for each device.

        Raises:
          ValueError: an unknown axis, or one named twice.
        """
        indices = [self.index_of(name) for name in axes]
        if len(set(indices)) < len(indices):
            raise ValueError(
                "a collective runs over each mesh axis at most once, but got "
                f"{[self.axis_names[i] for i in indices]}; drop the repeated name."
            )
        return self.ordered_groups(sorted(indices))

    def ordered_groups(self, axes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """As `groups`, by index and with devices in the order of `axes`."""
        outside = [i for i in range(self.num_axes) if i not in axes]
        group_size = math.prod(self.axis_sizes[i] for i in axes)
        rows = self.device_ids().transpose(*outside, *axes).reshape(-1, group_size)
        return tuple(tuple(row) for row in rows.tolist())

    def __str__(self) -> str:
        pairs = zip(self.axis_names, self.axis_sizes, strict=True)
        return ";".join(f"{name}:{size}" for name, size in pairs)


MeshLike: TypeAlias = (
    MeshShape
    | NamedMesh
    | str
    | int
    | Mapping[str, int]
    | Sequence[int]
    | Sequence[tuple[str, int]]
)


def parse_mesh(value: MeshLike, num_devices: int | None = None) -> MeshShape:
    """Reads a mesh in any of the forms that users write.

    Args:
      value: a `jax.sharding.Mesh` or `AbstractMesh`; a `MeshShape`; a string such as
        `"data:2;model:4"`, its pairs separated by any of `;` `,` `.` and space as in
        Mesh-TensorFlow; a dict; a list of (name, size) pairs; or up to three sizes,
        such as `(2, 4)`, whose axes are then called x, y and z. One size may be -1.
      num_devices: how many devices there are. It fills a size of -1, and the mesh must
        use all of them; only a jax mesh, which names its devices, may use fewer.

    Returns:
      The mesh's names and sizes.

    Raises:
      ValueError: the mesh is malformed or does not fit the devices.
      TypeError: `value` is of another type.
    """
    mesh = _shape_of(value, num_devices)
    if num_devices is None or mesh.size == num_devices:
        return mesh
    if mesh.size > num_devices:
        raise ValueError(
            f"a mesh cannot hold more devices than there are, but {mesh} needs "
            f"{mesh.size} and there are {num_devices}; use smaller axes, or -1 for one "
            "of them."
        )
    if _is_jax_mesh(value):
        return mesh
    raise ValueError(
        f"a mesh must use every device, but {mesh} holds {mesh.size} of {num_devices}; "
        "use -1 for one axis, or pass a jax.sharding.Mesh over the devices you want."
    )


def _shape_of(value: MeshLike, num_devices: int | None) -> MeshShape:
    if isinstance(value, MeshShape):
        return value
    if _is_jax_mesh(value):
        names = tuple(str(name) for name in value.axis_names)
        return MeshShape(names, tuple(int(size) for size in value.shape.values()))
    pairs = tuple(_pairs_of(value))
    names = tuple(name for name, _ in pairs)
    sizes = tuple(_integer(name, size) for name, size in pairs)
    return MeshShape(names, _fill(names, sizes, num_devices))


def _is_jax_mesh(value: object) -> TypeGuard[NamedMesh]:
    has_names = hasattr(value, "axis_names")
    return has_names and isinstance(getattr(value, "shape", None), Mapping)


def _pairs_of(value: object) -> Iterable[tuple[str, object]]:
    if isinstance(value, str):
        return _pairs_of_text(value)
    if isinstance(value, Mapping):
        return cast("Mapping[str, object]", value).items()
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return _pairs_of_sizes((value,))
    if not isinstance(value, list | tuple):
        raise TypeError(
            "a mesh must be a jax.sharding.Mesh, a string such as 'data:2;model:4', a "
            "dict, a list of (name, size) pairs or a tuple of sizes, but got "
            f"{value!r} of type {type(value).__name__}."
        )
    items: tuple[Any, ...] = tuple(value)
    if all(isinstance(item, list | tuple) and len(item) == 2 for item in items):
        return items
    return _pairs_of_sizes(items)


def _pairs_of_text(text: str) -> Iterable[tuple[str, object]]:
    tight = re.sub(r"\s*:\s*", ":", text.strip())
    for part in filter(None, _SEPARATORS.split(tight)):
        name, colon, size = part.partition(":")
        if not (name and colon and re.fullmatch(r"-?\d+", size)):
            named = re.sub(r"\W|^\d+", "", re.split(r"[:=]", part)[0]) or "x"
            digits = re.search(r"\d+", part)
            meant = f"{named}:{digits[0] if digits else 8}"
            raise ValueError(
                "a mesh string is made of name:size pairs such as 'data:2;model:4', "
                f"but {text!r} has the part {part!r}; write it as {meant!r}, with the "
                "size that you want."
            )
        yield name, int(size)


def _pairs_of_sizes(sizes: tuple[object, ...]) -> Iterable[tuple[str, object]]:
    if len(sizes) > len(_DEFAULT_NAMES):
        raise ValueError(
            f"at most {len(_DEFAULT_NAMES)} mesh axes can go without names, but got "
            f"{len(sizes)} sizes {sizes}; write (name, size) pairs."
        )
    return zip(_DEFAULT_NAMES, sizes, strict=False)


def _integer(name: str, size: object) -> int:
    try:
        return operator.index(cast("Any", size))
    except TypeError:
        raise TypeError(
            f"a mesh axis size must be an integer, but axis {name!r} has {size!r} of "
            f"type {type(size).__name__}; write a whole number, or -1 to fill."
        ) from None


def _fill(
    names: tuple[str, ...], sizes: tuple[int, ...], num_devices: int | None
) -> tuple[int, ...]:
    if -1 not in sizes:
        return sizes
    free = names[sizes.index(-1)]
    if sizes.count(-1) > 1:
        raise ValueError(
            "at most one mesh axis can be filled from the number of devices, but "
            f"{sizes.count(-1)} have size -1 in {names}, {sizes}; "
            "write the others."
        )
    if num_devices is None:
        raise ValueError(
            f"mesh axis {free!r} has size -1, which is filled from the number of "
            "devices, but that is not known here; write the size."
        )
    fixed = math.prod(size for size in sizes if size != -1)
    if fixed < 1 or num_devices % fixed:
        raise ValueError(
            f"mesh axis {free!r} has size -1, so the other axes must divide the "
            f"{num_devices} devices, but their product is {fixed}; change one of "
            f"{dict(zip(names, sizes, strict=True))}."
        )
    return tuple(num_devices // fixed if size == -1 else size for size in sizes)
