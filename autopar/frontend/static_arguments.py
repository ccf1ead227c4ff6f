"""Arguments that are compile-time constants, named by position as `jax.jit` does."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

# Position or name, type and value: 1 and True are equal, yet two constants.
Statics = tuple[tuple[int | str, type, Any], ...]


@dataclass(frozen=True)
class StaticArguments:
    """Which arguments are static; one given by keyword is found by its name."""

    positions: tuple[int, ...] = ()
    names: tuple[str, ...] = ()

    def split(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any], Statics]:
        """The arguments that are traced, by position and keyword, and the static ones.

        Raises:
          ValueError: a static argument that cannot be hashed.
        """
        if not (self.positions or self.names):
            return tuple(args), kwargs, ()
        statics = (
            *((i, type(args[i]), args[i]) for i in self.positions if i < len(args)),
            *((n, type(kwargs[n]), kwargs[n]) for n in self.names if n in kwargs),
        )
        for where, _, value in statics:
            _check_hashable(where, value)
        return (
            tuple(a for i, a in enumerate(args) if i not in self.positions),
            {k: v for k, v in kwargs.items() if k not in self.names},
            statics,
        )


def resolve_positions(
    fun: Callable[..., Any], option: str, positions: Sequence[int]
) -> tuple[int, ...]:
    """The positions counted from the first argument, in order.

    Raises:
      ValueError: one that `fun` has no argument at.
    """
    parameters = _parameters(fun)
    if any(p.kind is p.VAR_POSITIONAL for p in parameters) or not parameters:
        if negative := [i for i in positions if i < 0]:
            raise ValueError(
                f"`{option}` may count from the end only where the number of arguments "
                f"is known, but got {negative[0]}; count from the front."
            )
        return tuple(sorted(set(positions)))
    names = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    for position in positions:
        if not -len(names) <= position < len(names):
            raise ValueError(
                f"`{option}` must be positions of arguments, but got {position} and "
                f"the {len(names)} arguments are {', '.join(names)}."
            )
    return tuple(sorted({position % len(names) for position in positions}))


def positions_of(
    fun: Callable[..., Any], option: str, names: Sequence[str]
) -> tuple[int, ...]:
    """The positions of arguments that have names; none of those that are keywords.

    Raises:
      ValueError: one that `fun` has no argument of.
    """
    by_name = {each.name: each.kind for each in _parameters(fun)}
    takes_any = not by_name or len(by_name) < len(parameters_of(fun))
    for name in names:
        if name not in by_name and not takes_any:
            raise ValueError(
                f"`{option}` must be names of arguments, but got {name!r} and the "
                f"arguments are {', '.join(by_name)}."
            )
    known = enumerate(keyword_names(fun))
    return tuple(position for position, name in known if name and name in names)


def num_positional(fun: Callable[..., Any], wanted: int) -> int:
    """How many arguments can be given by position; with `*args` as many as wanted."""
    kinds = [each.kind for each in _parameters(fun)]
    number = sum(kind is not inspect.Parameter.KEYWORD_ONLY for kind in kinds)
    takes_any = not kinds or inspect.Parameter.VAR_POSITIONAL in kinds
    return max(wanted, number) if takes_any else number


def keyword_names(fun: Callable[..., Any]) -> tuple[str, ...]:
    """By position, the keyword that an argument can be given by, or ""."""
    return tuple(
        each.name if each.kind is each.POSITIONAL_OR_KEYWORD else ""
        for each in _parameters(fun)
    )


def bind_statics(fun: Callable[..., Any], statics: Statics) -> Callable[..., Any]:
    """The function of the arguments that are traced."""
    if not statics:
        return fun
    by_position = [(i, value) for i, _, value in statics if isinstance(i, int)]
    by_name = {name: value for name, _, value in statics if isinstance(name, str)}

    @functools.wraps(fun)
    def bound(*dynamic: Any, **kwargs: Any) -> Any:
        args = list(dynamic)
        for index, value in by_position:
            args.insert(index, value)
        return fun(*args, **kwargs, **by_name)

    # Leaves keep the names that the user's function gives them.
    kept = [
        parameter.replace(default=parameter.empty)
        for index, parameter in enumerate(_parameters(fun))
        if index not in dict(by_position) and parameter.name not in by_name
    ]
    bound.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
    return bound


def _parameters(fun: Callable[..., Any]) -> list[inspect.Parameter]:
    return [each for each in parameters_of(fun) if each.kind is not each.VAR_KEYWORD]


def parameters_of(fun: Callable[..., Any]) -> list[inspect.Parameter]:
    """What a signature says, if there is one."""
    try:
        return list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        return []


def _check_hashable(where: int | str, value: Any) -> None:
    try:
        hash(value)
    except TypeError as error:
        shown = shorten(repr(value), 80, placeholder=" ...")
        raise ValueError(
            f"Static arguments must be hashable, but argument {where!r} is {shown} "
            f"of type {type(value).__name__}; pass a tuple instead of a list, or leave "
            f"the argument out of static_argnums."
        ) from error
