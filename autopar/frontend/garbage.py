"""Planning without the cyclic garbage collector.

A plan of a deep model makes millions of objects that live until it is done, and no
cycles; walking them all again and again took a third of the time.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


def without_garbage_collection(function: _Function) -> _Function:
    """`function`, run with the collector off if it was on."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        was_on = gc.isenabled()
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            if was_on:
                gc.enable()

    return run  # pyright: ignore[reportReturnType]
