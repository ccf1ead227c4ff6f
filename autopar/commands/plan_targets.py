"""What `autopar plan` is asked to plan: a user's step, or a model by name.

A target with a colon names something importable; see `find_step` for what it may be. A
target without one names a model of `autopar.models`.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast


@dataclass(frozen=True, eq=False)
class Target:
    """A step, its example arguments, and what to call the two together."""

    name: str
    step: Callable[..., Any]
    args: tuple[Any, ...]


def find_step(
    target: str, args: str | None = None, settings: Mapping[str, Any] | None = None
) -> Target:
    """The step that a command line names, with example arguments.

    Args:
      target: `module:name`, of a function without arguments that returns (step, args);
        of an object, or of a function that returns one, with a method `step` and a
        method `abstract()` that returns args; or, with `args`, of the step itself.
        Without a colon, the name of a model.
      args: `module:name` of the example arguments, or of a function that returns them.
      settings: options of a model, by name.

    Raises:
      TypeError: what is named is none of these.
      ValueError: nothing has that name.
    """
    if ":" not in target:
        return _model(target, args, settings or {})
    if settings:
        raise ValueError(
            f"settings are those of a model by name, but {target!r} is a step "
            f"of your own; leave out {', '.join(settings)}."
        )
    found = look_up(target)
    if args is not None:
        examples = look_up(args)
        made = found, examples() if callable(examples) else examples
    else:
        made = found if _is_workload(found) else found()
        if _is_workload(made):
            made = made.step, made.abstract()
    if not isinstance(made, tuple) or len(made) != 2:
        raise TypeError(
            f"{target} must return (step, args), or an object with `step` and "
            f"`abstract()`, but returned {_described(made)}; if it is the step itself, "
            f"name its example arguments with --args."
        )
    step, examples = made
    if not callable(step):
        raise TypeError(f"the step must be a function, but got {step!r}.")
    if not isinstance(examples, tuple):
        raise TypeError(
            f"the example arguments must be a tuple, one item for each argument of the "
            f"step, but got a {type(examples).__name__}; write (state, batch)."
        )
    return Target(target, step, examples)


def look_up(target: str) -> Any:
    """What `module:name` names, looked for from the current folder first."""
    module_name, colon, name = target.partition(":")
    if not (module_name and colon and name):
        raise ValueError(
            f"a target is MODULE:NAME, such as train:for_autopar, but got {target!r}."
        )
    sys.path.insert(0, str(Path.cwd()))
    module = importlib.import_module(module_name.removesuffix(".py").replace("/", "."))
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            known = [each for each in vars(module) if not each.startswith("_")]
            raise ValueError(
                f"module {module_name!r} has no {name!r}; it has "
                f"{', '.join(known[:20]) or 'nothing public'}."
            )
        found = getattr(found, part)
    return cast("Any", found)


def parse_settings(texts: Sequence[str]) -> dict[str, Any]:
    """`num_layers=4` and the like as values by name; a word that is no value is text.

    Raises:
      ValueError: a text without `=`, or a name given twice.
    """
    settings: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals) or name in settings:
            raise ValueError(
                f"a setting is NAME=VALUE, each name once, such as num_layers=4, but "
                f"got {text!r}."
            )
        try:
            settings[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            words = {"true": True, "false": False, "none": None}
            settings[name] = words.get(value.lower(), value)
    return settings


def parse_method(text: str) -> Any:
    """A method as it is written in Python: `Auto()`, `Zero(stage=3)`; `Auto` will do.

    Raises:
      ValueError: it is no method, or its arguments are no literals.
      TypeError: it takes other arguments.
    """
    from ..clusters.hardware import nearest
    from ..methods.methods import METHODS

    by_name: dict[str, Any] = {kind.__name__: kind for kind in METHODS}
    name, bracket, _ = text.strip().removeprefix("autopar.").partition("(")
    if name not in by_name:
        raise ValueError(
            f"a method is one of {', '.join(by_name)}, written as in Python, but got "
            f"{text!r}{nearest(name, by_name) or '; use one of them.'}"
        )
    if not bracket:
        return by_name[name]()
    try:
        call = cast("ast.Call", ast.parse(text.strip(), mode="eval").body)
        args = [ast.literal_eval(each) for each in call.args]
        named = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (SyntaxError, ValueError, AttributeError) as error:
        raise ValueError(
            f"a method is written as in Python, with numbers and texts as arguments, "
            f"such as 'PipelineParallel(num_stages=4)', but got {text!r}."
        ) from error
    return by_name[name](*args, **named)


def parse_pins(texts: Sequence[str]) -> dict[str, str]:
    """`params/w=[-, model]` and the like as layouts by path or expression.

    The layout begins at the last `=[`, as expressions may hold either.

    Raises:
      ValueError: a text without one, or a path given twice.
    """
    pairs = [text.rpartition("=[") for text in texts]
    pins = {path: f"[{layout}" for path, _, layout in pairs}
    if len(pins) < len(texts) or "" in pins:
        raise ValueError(
            f"a pin is PATH=SPEC, each path once, such as 'params/w=[-, model]', "
            f"but got {', '.join(map(repr, texts))}."
        )
    return pins


def _described(value: Any) -> str:
    """What it is, without the arrays in it."""
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"


def _is_workload(found: Any) -> bool:
    return all(callable(getattr(found, name, None)) for name in ("step", "abstract"))


def _model(name: str, args: str | None, settings: Mapping[str, Any]) -> Target:
    if args is not None:
        raise ValueError(
            f"a model has its own example arguments, but --args is {args!r}; leave it "
            f"out, or name the step as MODULE:FUNCTION."
        )
    try:
        from autopar.models import build
    except ModuleNotFoundError as error:
        raise ValueError(
            f"models by name need the package {error.name!r}, which is not installed; "
            f"pip install 'autopar[examples]'."
        ) from error

    try:
        workload = build(name, **settings)
    except ValueError as error:
        raise ValueError(
            f"a target is MODULE:NAME, such as train:for_autopar, or a model by name: "
            f"{error}"
        ) from error
    return Target(name, workload.step, workload.abstract())
