"""Attention as one operator: found in a step, split over devices, one kernel."""

from . import fused_attention, rule

__all__ = ["fused_attention", "rule"]
