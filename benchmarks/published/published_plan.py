"""Plans as they were published: stages, layouts and microbatches, from text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.published.columns import whole
from benchmarks.published.work import Layout

_SUBMESH = re.compile(r"(?:(\d+)x)?\((\d+)[;,] ?(\d+)\)|(\d+)")
_PAIR = re.compile(r"\((\d+)[;,] ?(\d+)\)")
_IN_COMMENTS = r"(\d+)(?: GPUs)? \((\d+);(\d+);(\d+);(\d+)\)"


@dataclass(frozen=True)
class PublishedPlan:
    """Stages as they were published: the layout of each, and the microbatches.

    None: their number was not published, and is searched.
    """

    layouts: tuple[Layout, ...]
    num_microbatches: int | None


def published_plan(
    column: str, record: Mapping[str, str], devices_per_host: int, batch_size: int
) -> PublishedPlan | None:
    """The plan of a system's column, from the columns that bear its name.

    Stages are `alpa_plan`, or equal ones `megatron_tp`, `megatron_pp`, `megatron_dp`;
    microbatches are `alpa_microbatches`, or each has `alpa_microbatch_size` examples.

    Raises:
      ValueError: an entry cannot be read, or does not go with the others.
    """
    own = {
        name.removeprefix(f"{column}_"): text
        for name, text in record.items()
        if name.startswith(f"{column}_") and text.strip()
    }
    number = whole(record, "gpus")
    if "plan" in own:
        layouts = parse_layouts(own["plan"], devices_per_host)
    elif "tp" in own or "pp" in own:
        tensor, stages = (whole(own, name, default=1) for name in ("tp", "pp"))
        data = whole(own, "dp", default=max(number // (tensor * stages), 1))
        if data * tensor * stages != number:
            raise ValueError(
                f"the GPUs of a row are data x tensor x pipeline groups, but {number} "
                f"are not {data} x {tensor} x {stages}."
            )
        layouts = equal_layouts(data, tensor, stages, devices_per_host)
    else:
        return None
    size = sum(layout.size for layout in layouts)
    if size != number:
        raise ValueError(
            f"the stages of a plan have all GPUs of a row, but those of {column} have "
            f"{size} of {number}."
        )
    if f"{column}_microbatches" in record:
        return PublishedPlan(layouts, whole(record, f"{column}_microbatches"))
    if "microbatch_size" not in own:
        return PublishedPlan(layouts, None)
    size = whole(own, "microbatch_size") * layouts[0].data
    if batch_size % size:
        raise ValueError(
            f"microbatches of all groups divide the batch, but {size} examples do "
            f"not divide {batch_size}."
        )
    return PublishedPlan(layouts, batch_size // size)


def equal_layouts(
    data: int, tensor: int, stages: int, devices_per_host: int
) -> tuple[Layout, ...]:
    """Equal stages of data and tensor groups."""
    hosts, devices = submesh(data * tensor, devices_per_host)
    return (Layout(hosts, devices, data, tensor),) * stages


def parse_layouts(text: str, devices_per_host: int) -> tuple[Layout, ...]:
    """Stages as `4x(1;8) logical (2;4)` or `2+2+4 GPUs logical (2;1)(2;1)(4;1)`.

    Terms of both kinds may be added: `2x(1;4)+(1;8)`. Submeshes are (hosts;devices of
    each), logical shapes (data;tensor), which are those of the submesh where they are
    left out.

    Raises:
      ValueError: the text is neither, or shapes and submeshes differ in size.
    """
    physical, _, logical = text.partition("logical")
    shapes = [(int(a), int(b)) for a, b in _PAIR.findall(logical)]
    submeshes: list[tuple[int, int]] = []
    for term in physical.replace("GPUs", "").split("+"):
        found = _SUBMESH.fullmatch(term.strip())
        if found is None:
            raise ValueError(
                f"a plan is written as '4x(1;8) logical (2;4)' or '2+2+4 GPUs logical "
                f"(2;1)(2;1)(4;1)', but got {text!r}."
            )
        count, hosts, devices, number = found.groups()
        if number:
            submeshes.append(submesh(int(number), devices_per_host))
        else:
            submeshes += [(int(hosts), int(devices))] * int(count or 1)
    shapes = shapes or submeshes
    shapes = shapes * len(submeshes) if len(shapes) == 1 else shapes
    if len(shapes) != len(submeshes):
        raise ValueError(
            f"a plan has one logical shape, or one for each of its {len(submeshes)} "
            f"submeshes, but got {len(shapes)} in {text!r}."
        )
    pairs = [(*a, *b) for a, b in zip(submeshes, shapes, strict=True)]
    for hosts, devices, data, tensor in pairs:
        if hosts * devices != data * tensor:
            raise ValueError(
                f"a logical shape has as many devices as its submesh, but "
                f"({data};{tensor}) stands for ({hosts};{devices}) in {text!r}."
            )
    return tuple(Layout(*pair) for pair in pairs)


def submesh(number: int, devices_per_host: int) -> tuple[int, int]:
    """The fewest hosts with equal parts of so many devices, and the part of each."""
    hosts = -(-number // devices_per_host)
    while number % hosts:
        hosts += 1
    return hosts, number // hosts


def plans_in_comments(
    comments: Sequence[str], devices_per_host: int
) -> dict[int, PublishedPlan]:
    """Plans of the baseline by GPUs: `4 GPUs (2;1;2;128), 8 (1;1;8;128)`.

    Numbers are (data, tensor, stages, microbatches).
    """
    text = next((each for each in comments if "(dp,tp,pp,microbatches)" in each), "")
    found = {}
    for numbers in re.findall(_IN_COMMENTS, text):
        gpus, data, tensor, stages, count = map(int, numbers)
        layouts = equal_layouts(data, tensor, stages, devices_per_host)
        found[gpus] = PublishedPlan(layouts, count)
    return found
