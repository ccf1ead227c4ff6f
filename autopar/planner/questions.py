"""Searches as generators: they ask for plans, and a loop outside of them answers."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any, Generic, TypeVar

_Question = TypeVar("_Question")
_Answer = TypeVar("_Answer")
_Result = TypeVar("_Result")


class Questions(Generic[_Question, _Answer, _Result]):
    """What a search asks; `asked` is None once the `result` is known."""

    asked: _Question | None
    result: _Result

    def __init__(self, search: Generator[_Question, _Answer, _Result]) -> None:
        self._search = search
        self._go_on(partial(next, search))

    def answer(self, answer: _Answer | Exception) -> None:
        """Goes on with an answer, or raises an error where the search asked."""
        is_error = isinstance(answer, Exception)
        go_on: Any = self._search.throw if is_error else self._search.send
        self._go_on(partial(go_on, answer))

    def _go_on(self, go_on: Callable[[], _Question]) -> None:
        try:
            self.asked = go_on()
        except StopIteration as ended:
            self.asked, self.result = None, ended.value
