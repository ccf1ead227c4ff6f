"""Automatic parallelization of unmodified JAX train steps.

The public names are those of `__init__.pyi`. Each is imported when it is first used:
`import autopar` waits neither for jax nor for the planner and the runtime.
"""

import ast as _ast
import importlib as _importlib
import os as _os

# An installed package holds solver/, runtime/ and models/ in this folder; a checkout
# keeps them beside it and in benchmarks/, so there these are searched for them too.
if not _os.path.isdir(_os.path.join(_os.path.dirname(__file__), "solver")):
    _above = _os.path.dirname(_os.path.dirname(_os.path.abspath(__file__)))
    __path__ += [_above, _os.path.join(_above, "benchmarks")]

with open(_os.path.join(_os.path.dirname(__file__), "__init__.pyi")) as _stub:
    _HOMES = {
        alias.name: f"{__name__}.{node.module}"
        for node in _ast.parse(_stub.read()).body
        if isinstance(node, _ast.ImportFrom)
        for alias in node.names
    }
__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _importlib.import_module(_HOMES[name])
    if not hasattr(home, name):  # a module of its own
        _importlib.import_module(f"{_HOMES[name]}.{name}")
    globals()[name] = getattr(home, name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
