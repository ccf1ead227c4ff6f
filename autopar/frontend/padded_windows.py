"""Folds zero padding into the convolutions and window sums that read it.

JAX writes the gradient of a window sum as a sum over a padded cotangent, whose size no
device count divides. As padding and dilation of the windows themselves it costs no
memory, and the cotangent can be split in space (`rules/window.py`).
"""

from __future__ import annotations

from typing import Any

from ..jax_compat import is_zero_literal, with_eqns, with_jaxpr, with_jaxprs


def with_padded_windows(closed: Any) -> Any:
    """The same jaxpr, in which windows read what is padded and pad it themselves.

    The padding stays for other readers; without any it is dead code.
    """
    return with_jaxpr(closed, _folded)


def _folded(jaxpr: Any) -> Any:
    pads: dict[int, Any] = {}  # equations by the variable they make
    eqns = []
    for eqn in jaxpr.eqns:
        kind, params = eqn.primitive.name, eqn.params
        if kind == "pad" and is_zero_literal(eqn.invars[1]) and _only_grows(params):
            pads[id(eqn.outvars[0])] = eqn
        elif kind in _DILATIONS and id(eqn.invars[0]) in pads:
            eqn = _reading_unpadded(eqn, pads[id(eqn.invars[0])])
        else:
            eqn = with_jaxprs(eqn, _folded)
        eqns.append(eqn)
    return with_eqns(jaxpr, eqns)


_DILATIONS = {
    "conv_general_dilated": "lhs_dilation",
    "reduce_window_sum": "base_dilation",
}


def _reading_unpadded(eqn: Any, pad: Any) -> Any:
    """The equation on what is padded, or itself if its windows cannot pad so."""
    config, params = pad.params["padding_config"], eqn.params
    name = _DILATIONS[eqn.primitive.name]
    dims = list(range(len(config)))
    if eqn.primitive.name == "conv_general_dilated":
        batch, features, *dims = params["dimension_numbers"].lhs_spec
        if any(config[dim] != (0, 0, 0) for dim in (batch, features)):
            return eqn
    padding, dilations = [], []
    for dim, (low, high), dilation in zip(
        dims, params["padding"], params[name], strict=True
    ):
        before, after, between = config[dim]
        if dilation != 1 or min(low, high) < 0:
            return eqn
        padding.append((int(low + before), int(high + after)))
        dilations.append(int(between + 1))
    changed = {"padding": tuple(padding), name: tuple(dilations)}
    return eqn.replace(
        invars=[pad.invars[0], *eqn.invars[1:]], params={**params, **changed}
    )


def _only_grows(params: Any) -> bool:
    return all(min(each) >= 0 for each in params["padding_config"])
