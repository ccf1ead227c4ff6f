"""The page that follows a step: its names are there, and are called in that order."""

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\[`([\w.]+)`\]\(\.\./([^)]+)\)")
MOST_LINES = 120


def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    loss, gradient = jax.value_and_grad(lambda w: jnp.square(x @ w).sum())(w)
    return w - gradient, loss


def is_function(name: str) -> bool:
    """Whether a name is no value's: those are classes."""
    return not name.rpartition(".")[2][0].isupper()


def test_every_function_is_called_in_the_order_of_the_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", "off")
    text = (ROOT / "docs" / "walk.md").read_text()
    assert text.count("\n") <= MOST_LINES
    links = [(path, name) for name, path in LINK.findall(text)]
    called: dict[tuple[str, str], int] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
            path = Path(frame.f_code.co_filename).relative_to(ROOT).as_posix()
            called.setdefault((path, frame.f_code.co_qualname), len(called))

    sys.setprofile(note)
    try:
        jax.block_until_ready(autopar.parallelize(step)(jnp.eye(64), jnp.eye(64)))
    finally:
        sys.setprofile(None)
    wanted = [(path, name) for path, name in links if is_function(name)]
    assert not [each for each in wanted if each not in called]
    assert wanted == sorted(wanted, key=called.__getitem__)
    for path, name in links:
        if not is_function(name):
            assert f"class {name}" in (ROOT / path).read_text()
