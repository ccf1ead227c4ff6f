"""Names of columns and their entries, as published tables write them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

TFLOPS = "_tflops"
_NAMES = {
    "gpus": "num_gpus n_gpus gpu number_of_gpus devices num_devices gpu_count",
    "layers": "num_layers number_of_layers n_layers",
    "hidden": "hidden_size hidden_dim hidden_dimension d_model h",
    "heads": "num_heads attention_heads number_of_attention_heads n_heads",
    "experts": "num_experts number_of_experts n_experts",
    "channels": "base_channel base_channels num_channels",
    "width_factor": "width",
    "batch": "batch_size global_batch global_batch_size",
    "seq_len": "seq sequence sequence_length seq_length",
    "vocab_size": "vocab vocabulary vocabulary_size",
    "mlp_ratio": "ffn_ratio mlp_factor",
    "dp": "data data_parallel data_parallel_size",
    "tp": "tensor tensor_parallel tensor_parallel_size tensor_model_parallel_size mp",
    "pp": "pipeline pipeline_parallel pipeline_parallel_size"
    " pipeline_model_parallel_size stages",
    "microbatches": "num_microbatches number_of_microbatches",
    "microbatch_size": "micro_batch_size microbatch micro_batch mbs",
    "pflop_per_iter": "pflop_per_iteration pflops_per_iter",
}
_MEANT = {name: key for key, names in _NAMES.items() for name in names.split()}
_SYSTEMS = {
    "megatron": "megatron_lm ptd_p ptd megatron_v2",
    "deepspeed": "deepspeed_moe zero_2 zero2",
    "inter_only": "inter_op inter inter_op_only inter_op_parallelism_only",
    "intra_only": "intra_op intra intra_op_only intra_op_parallelism_only",
    "pp_dp": "ppdp",
    "alpa": "alpa_ours ours auto",
    "": "achieved tflops throughput",
}
_SYSTEM = {name: key for key, names in _SYSTEMS.items() for name in names.split()}
_UNIT = re.compile(r"[\s_(\[,:]*(?:tflops?|teraflops?)(?:\b|_|$|/).*")
_NOT_MEASURED = ("", "-", "–", "—", "n/a", "na", "nan", "none")
_OUT_OF_MEMORY = ("oom", "x", "×", "✗", "0", "0.0", "-1", "-1.0", "out of memory")
_WHOLE = re.compile(r"\d+(,\d{3})*(\.0+)?")


@dataclass(frozen=True)
class Cell:
    """A measured number, in Tflop/s a GPU; a starred one was projected by its authors.

    None: it ran out of memory.
    """

    column: str
    tflops: float | None
    is_projected: bool


def column_name(text: str) -> str:
    """`alpa_tflops` of `Alpa (TFLOPS/GPU)`, `tp` of `Tensor model-parallel size`.

    Other units than Tflop/s are left out. A column that names no system is `_tflops`.
    """
    name = text.strip().lower()
    measured = _UNIT.search(name)
    name = name[: measured.start()] if measured else name.split("(")[0]
    name = "_".join(re.findall(r"[^\W_]+", name))
    if measured:
        return _SYSTEM.get(name, name) + TFLOPS
    for system in _SYSTEMS:
        if system and name.startswith(f"{system}_"):
            rest = name.removeprefix(f"{system}_")
            return f"{system}_{_MEANT.get(rest, rest)}"
    return _MEANT.get(name, name)


def nearest(column: str, names: Sequence[str]) -> str:
    """Who a missing column may be: `; is it 'layrs'?`, or nothing."""
    by_lower = {column_name(name): name for name in names}
    close = get_close_matches(column, by_lower, 1, 0.7)
    return f"; is it {by_lower[close[0]]!r}?" if close else ""


def cell_of(name: str, text: str) -> Cell | None:
    """The entry of a column of Tflop/s; None if nothing was measured.

    Raises:
      ValueError: it is no number.
    """
    number, column = text.strip().lower(), name.removesuffix(TFLOPS)
    if number in _NOT_MEASURED:
        return None
    if number in _OUT_OF_MEMORY:
        return Cell(column, None, False)
    is_projected = number.endswith("*")
    return Cell(column, positive(name, number.removesuffix("*")), is_projected)


def whole(record: Mapping[str, str], column: str) -> int:
    """A column's whole number above 0.

    Raises:
      KeyError: there is no such column.
      ValueError: it is none.
    """
    text = record[column].strip()
    number = int(float(text.replace(",", ""))) if _WHOLE.fullmatch(text) else 0
    if not number:
        raise ValueError(f"`{column}` is a whole number above 0, but got {text!r}.")
    return number


def positive(column: str, text: str) -> float:
    """A number above 0.

    Raises:
      ValueError: it is none.
    """
    number = 0.0
    if re.fullmatch(r"\d+(\.\d+)?(e[+-]?\d+)?", text.strip().lower()):
        number = float(text)
    if not number:
        raise ValueError(f"`{column}` is a number above 0, but got {text!r}.")
    return number
