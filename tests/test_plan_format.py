"""docs/plan_format.md and the files are about the same fields."""

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.errors import PlanFileError
from autopar.graph.op_graph import Role
from autopar.plans import plan_file
from autopar.plans.plan_file import from_json, read_plan, to_json
from autopar.sharding.collective import KINDS
from tests.rows.fixtures import f6
from tests.tiny_plans import make_plan

PAGE = Path(__file__).parents[1] / "docs" / "plan_format.md"


def documented() -> dict[str, dict[str, bool]]:
    """By heading, each field and whether it is optional."""
    sections: dict[str, dict[str, bool]] = {}
    for part in re.split(r"^#+ ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", body, flags=re.MULTILINE)
        if rows:
            sections[title] = {name: "optional" in kind for name, kind in rows}
    return sections


def one_of_everything() -> dict[str, Any]:
    """A document in which every optional field is written."""
    plan = make_plan()
    predicted = replace(plan.predicted, host_seconds=1e-3, host_bytes=128)
    inputs = (replace(plan.inputs[0], memory="host"), *plan.inputs[1:])
    texts = {"remat": "full:3", "device_kind": "CPU"}
    plan = replace(
        plan, **texts, padding=((30, 32),), predicted=predicted, inputs=inputs
    )
    return json.loads(to_json(plan))


@cache
def pipeline_text() -> str:
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=8)
    case = f6()
    plan = autopar.parallelize(case.step, method=method).plan(*case.args)
    stages = replace(plan.stages, stage_products=(1, 1))
    return to_json(stages)


def pipeline() -> dict[str, Any]:
    return json.loads(pipeline_text())


def fields_of(items: list[dict[str, Any]]) -> set[str]:
    return {name for item in items for name in item}


def test_the_gap_to_plans_of_any_memory_of_an_earlier_file_is_the_only_one() -> None:
    """Earlier files had one to what fits, too, which was no bound."""
    document = json.loads(to_json(make_plan()))
    document["predicted"] |= {"optimality_gap": 0.001, "free_gap": 0.03}
    plan = from_json(json.dumps(document), "plan.json")
    assert plan.predicted.optimality_gap == 0.03
    assert "free_gap" not in json.loads(to_json(plan))["predicted"]
    assert from_json(to_json(plan), "plan.json") == plan


@pytest.mark.parametrize("part", ["predicted", "inputs", "operators", "collectives"])
def test_every_field_of_a_part_is_on_the_page_and_no_other(part: str) -> None:
    value = one_of_everything()[part]
    seen = fields_of(value if isinstance(value, list) else [value])
    assert set(documented()[f"`{part}`"]) == seen


def test_every_field_of_the_rest_is_on_the_page_and_no_other() -> None:
    document, sections = one_of_everything(), documented()
    (title,) = [title for title in sections if "autopar-plan" in title]
    assert set(sections[title]) == set(document)
    copies = [copy for each in document["tensors"] for copy in each.get("copies", [])]
    tensors = fields_of(document["tensors"]) | fields_of(copies)
    assert set(sections["`tensors`"]) == tensors


def test_every_field_of_a_pipeline_is_on_the_page_and_no_other() -> None:
    document, sections = pipeline(), documented()
    (title,) = [title for title in sections if "autopar-pipeline-plan" in title]
    (of_plan,) = [title for title in sections if "autopar-plan" in title]
    own = fields_of(document["programs"]) - set(sections[of_plan])
    assert set(sections[title]) == set(document) | own
    assert set(sections["`transfers`"]) == fields_of(document["transfers"])


def test_optional_fields_may_be_left_out_and_others_may_not() -> None:
    sections = documented()
    (title,) = [title for title in sections if "autopar-plan" in title]
    parts = {"": title} | {
        part: f"`{part}`" for part in ("predicted", "inputs", "operators")
    }
    for part, heading in parts.items():
        for name, is_optional in sections[heading].items():
            document = one_of_everything()
            holder = document[part] if part else document
            del (holder[0] if isinstance(holder, list) else holder)[name]
            if is_optional:
                from_json(json.dumps(document), "plan.json")
            else:
                with pytest.raises(PlanFileError):
                    from_json(json.dumps(document), "plan.json")


def test_a_pipeline_without_its_optional_fields_is_read() -> None:
    document = pipeline()
    del document["stage_products"]
    read_plan(json.dumps(document), "plan.json")
    for name in set(document) - {"format", "version"}:
        less = {key: value for key, value in document.items() if key != name}
        with pytest.raises(PlanFileError, match=f"`{name}` is missing"):
            read_plan(json.dumps(less), "plan.json")


def test_the_words_on_the_page_are_those_that_are_read() -> None:
    text = PAGE.read_text()
    versions = re.findall(r"\| `version` \| integer \| (\d+) \|", text)
    assert versions == [str(plan_file.VERSION)] * 2
    formats = re.findall(r"\| `format` \| text \| `([\w-]+)` \|", text)
    assert formats == [plan_file.FORMAT, plan_file.STAGED_FORMAT]
    kinds = next(line for line in text.splitlines() if "`collective_permute`" in line)
    assert set(re.findall(r"`(\w+)`", kinds)) == {"kind", *KINDS}
    roles = next(line for line in text.splitlines() if line.startswith("| `role`"))
    assert set(re.findall(r"`(\w+)`", roles)) == {"role", *Role.__args__}
