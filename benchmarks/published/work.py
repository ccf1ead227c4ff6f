"""What one device does for a microbatch: the units of a model as kernels and moves.

A *unit* is the least that a pipeline stage may hold: an attention, an MLP, a layer of
experts, a residual block, the embedding, the head. Its kernels are matrix products,
fused attentions and *streams*, which only read and write the memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from autopar.sharding.collective import CollectiveKind
from autopar.sharding.mesh import MeshShape

AXES = ("outer", "inner", "context", "tensor")
DATA = AXES[:2]
_BEHIND = ("mlp", "experts")  # units inside a layer, which is recomputed as a whole


@dataclass(frozen=True)
class Layout:
    """A stage's devices: hosts by devices of each, and what its groups share out.

    The batch is split over `data`, sequences over `context`, layers over `tensor`.
    Experts, or parameters that are gathered, are split over `inner` neighbours of
    `data`; over all of it if 0.
    """

    hosts: int
    devices: int
    data: int
    tensor: int
    inner: int = 0
    context: int = 1

    @property
    def size(self) -> int:
        return self.hosts * self.devices

    @property
    def mesh(self) -> MeshShape:
        inner = self.inner or self.data
        return MeshShape(AXES, (self.data // inner, inner, self.context, self.tensor))

    def __str__(self) -> str:
        parts = f", inner {self.inner}" if self.inner else ""
        parts += f", context {self.context}" if self.context > 1 else ""
        return f"({self.hosts};{self.devices}) as ({self.data};{self.tensor}){parts}"


@dataclass(frozen=True)
class Product:
    """[m, k] x [k, n], `count` times; `is_weight`: [k, n] are parameters."""

    m: float
    n: float
    k: float
    count: float = 1.0
    is_weight: bool = True

    @property
    def flops(self) -> float:
        return 2 * self.m * self.n * self.k * self.count


@dataclass(frozen=True)
class Stream:
    """Bytes that a kernel chain reads or writes once, and how often it does."""

    bytes: float
    forward: float
    backward: float


@dataclass(frozen=True)
class Attention:
    """One fused attention: flops of its two products forward, but for masked ones."""

    flops: float
    result_bytes: float


@dataclass(frozen=True)
class Move:
    """A collective of one pass: bytes of its result on a device, and how often.

    What is `ahead` may run beside the compute of the unit.
    """

    kind: CollectiveKind
    axes: tuple[str, ...]
    bytes: float
    forward: float = 1.0
    backward: float = 1.0
    is_ahead: bool = False


@dataclass(frozen=True, eq=False)
class Unit:
    """One unit on one device.

    Attributes:
      params: of the device's tensor group; `experts`: its share of experts'.
      kept_bytes: what the backward pass reads, if nothing is recomputed.
      input_bytes: what it reads; of a layer all kept if all is recomputed.
      ends_layer: nothing that is recomputed with it reads its result.
      border_bytes: what it hands on, of all the devices of its data groups together.
    """

    name: str
    products: tuple[Product, ...] = ()
    streams: tuple[Stream, ...] = ()
    attention: Attention | None = None
    moves: tuple[Move, ...] = ()
    params: float = 0.0
    experts: float = 0.0
    kept_bytes: float = 0.0
    input_bytes: float = 0.0
    border_bytes: float = 0.0
    is_repeated: bool = True
    ends_layer: bool = True

    def held_bytes(self, remat: str, itemsize: int) -> float:
        """What is kept of a microbatch from its forward to its backward pass."""
        if remat == "none":
            return self.kept_bytes
        step = {"streams": 1, "half": 2}.get(remat)
        if step is None:
            return 0.0 if self.name in _BEHIND else self.input_bytes
        results = (p.m * p.n * p.count for p in self.products[::step] if p.is_weight)
        context = self.attention.result_bytes if self.attention else 0.0
        return self.input_bytes + sum(results) * itemsize + context


Units: TypeAlias = tuple[Unit, ...]


@dataclass(frozen=True)
class Execution:
    """How a system computes layers.

    Attributes:
      fuses_attention: no matrix of queries by keys is in memory.
      splits_sequence: what a tensor group does not split is split by tokens
        (Korthikanti et al. 2022): an all_reduce is an all_gather and a reduce_scatter.
      norm_passes: how often a norm goes over its data, beside one kernel.
      softmax_passes: how often an attention that is not fused goes over its scores,
        forward and backward: twice for what is summed up, then read and written.
      one_group: experts route all tokens of a device at once.
    """

    fuses_attention: bool = False
    splits_sequence: bool = False
    norm_passes: float = 1.0
    softmax_passes: tuple[float, float] = (4.0, 5.0)
    one_group: bool = False


@dataclass(frozen=True)
class Transformer:
    """A decoder: sizes as their publishers give them.

    `experts` of each `experts_every` layers take `top_k` of a token; `group_size`
    tokens are routed together into slots (GShard), or without any limit if 0.
    `window`: every second layer attends to so many tokens.
    """

    layers: int
    hidden: int
    heads: int
    mlp: int
    vocab_size: int
    seq_len: int
    kv_heads: int = 0
    head_dim: int = 0
    is_gated: bool = False
    experts: int = 0
    top_k: int = 2
    experts_every: int = 1
    group_size: int = 0
    window: int = 0
    dtype: str = "bfloat16"
    itemsize: int = 2
    state_bytes: int = 12
    units_a_layer: int = 2

    @property
    def width(self) -> int:
        """Of all queries of a token."""
        return self.heads * (self.head_dim or self.hidden // self.heads)

    @property
    def kv_width(self) -> int:
        """Of the keys of a token, and of its values."""
        return self.width // self.heads * (self.kv_heads or self.heads)

    @property
    def sequence(self) -> tuple[int, ...]:
        """Numbers of `units` in the order of the model."""
        if not self.experts or self.experts_every == 1:
            return (0, *(1, 2) * self.layers, 3)
        return (0, *(1, 2, 1, 3) * (self.layers // 2), 4)

    @property
    def examples_at_once(self) -> int:
        return max(self.group_size // self.seq_len, 1)

    def units(self, layout: Layout, size: float, how: Execution) -> Units:
        """Each unit once, for `size` sequences on the devices of a layout together."""
        here = size / layout.data
        part = _Part(self, layout, here, here * self.seq_len / layout.context, how)
        found = [part.embedding(), part.attention()]
        if not self.experts or self.experts_every > 1:
            found.append(part.mlp())
        if self.experts:
            found.append(part.experts())
        return (*found, part.head())


@dataclass(frozen=True)
class _Part:
    """The share of one device: `here` sequences, of which it has `tokens`."""

    of: Transformer
    layout: Layout
    here: float
    tokens: float
    how: Execution

    @property
    def row_bytes(self) -> float:
        """Of what each layer hands on."""
        return self.tokens * self.of.hidden * self.of.itemsize

    @property
    def between_bytes(self) -> float:
        """Of it, what a device has between the products of a tensor group."""
        is_split = self.how.splits_sequence
        return self.row_bytes / (self.layout.tensor if is_split else 1)

    def moves(self) -> tuple[Move, ...]:
        """Into and out of the layers that a tensor group shares out."""
        axes, rows = ("tensor",), self.row_bytes
        if self.layout.tensor == 1:
            return ()
        if not self.how.splits_sequence:
            return (Move("all_reduce", axes, rows),)
        return (
            Move("all_gather", axes, rows),
            Move("reduce_scatter", axes, rows / self.layout.tensor),
        )

    def around(self) -> tuple[Stream, Stream]:
        """The norm before a unit's products and the sum behind them."""
        passes = self.how.norm_passes
        norm = Stream(self.between_bytes, 2 * passes, 3 * passes)
        return norm, Stream(self.between_bytes, 3, 2)

    def unit(self, name: str, params: float, **more: object) -> Unit:
        return Unit(
            name,
            params=params,
            input_bytes=self.between_bytes,
            border_bytes=self.row_bytes * self.layout.data * self.layout.context,
            **more,  # pyright: ignore[reportArgumentType]
        )

    def attention(self) -> Unit:
        of, tensor, layout = self.of, self.layout.tensor, self.layout
        width, kv, size = of.width / tensor, of.kv_width / tensor, of.itemsize
        joined = width + 2 * kv
        products = [
            Product(self.tokens, joined, of.hidden),
            Product(self.tokens, of.hidden, width),
        ]
        streams = [*self.around()]
        rows = self.tokens * size
        kept = 2 * self.between_bytes + rows * (joined + width)
        if not of.is_gated:
            streams.append(self._bias_sums(joined + of.hidden))
        scores, fused, moves = 0.0, None, [*self.moves()]
        if self.how.fuses_attention:
            seen = of.seq_len / 2  # blocks that a causal mask hides are left out
            if of.window:
                seen = (seen + min(seen, of.window)) / 2
            fused = Attention(4 * self.tokens * seen * width, rows * width)
            streams.append(Stream(rows * joined, 2, 2))
        else:
            depth = of.width // of.heads
            count = self.here * of.heads / tensor
            queries = self.tokens / self.here
            products += [
                Product(queries, of.seq_len, depth, count, is_weight=False),
                Product(queries, depth, of.seq_len, count, is_weight=False),
            ]
            scores = 2 * count * queries * of.seq_len * size
            streams.append(Stream(rows * (joined + width), 2, 2))  # heads lead
            streams.append(Stream(scores / 2, *self.how.softmax_passes))
        if layout.context > 1:
            around = rows * 2 * kv * (layout.context - 1)
            axes = ("context",)
            moves.append(Move("collective_permute", axes, around, 1, 2, is_ahead=True))
        whole = of.hidden * (2 * of.width + 2 * of.kv_width)
        return self.unit(
            *("attention", whole / tensor),
            products=tuple(products),
            streams=tuple(streams),
            attention=fused,
            moves=tuple(moves),
            ends_layer=False,
            kept_bytes=kept + scores,
        )

    def _bias_sums(self, width: float) -> Stream:
        """Gradients of biases, which models without gates have."""
        return Stream(self.tokens * width * self.of.itemsize, 0, 1)

    def mlp(self) -> Unit:
        of, tensor = self.of, self.layout.tensor
        inner = of.mlp / tensor
        up = (2 if of.is_gated else 1) * inner
        whole = of.hidden * of.mlp * (3 if of.is_gated else 2)
        rows = self.tokens * of.itemsize
        streams = [*self.around(), self._activation(rows * inner)]
        if not of.is_gated:
            streams.append(self._bias_sums(up + of.hidden))
        return self.unit(
            *("mlp", whole / tensor),
            # Between layers of experts, which have as many flops, all is one layer
            # of those that Alpa recomputes.
            ends_layer=of.experts_every == 1,
            products=(
                Product(self.tokens, up, of.hidden),
                Product(self.tokens, of.hidden, inner),
            ),
            streams=tuple(streams),
            moves=self.moves(),
            kept_bytes=2 * self.between_bytes + rows * (up + inner),
        )

    def _activation(self, amount: float) -> Stream:
        return Stream(amount, 3, 5) if self.of.is_gated else Stream(amount, 2, 3)

    def experts(self) -> Unit:
        """Experts that take all that is routed to them, equally many tokens each; or
        slots of groups, filled and emptied by products with one-hot masks (GShard)."""
        of, layout, size = self.of, self.layout, self.of.itemsize
        local = of.experts / (layout.inner or layout.data)
        inner = of.mlp / layout.tensor
        up, matrices = (2 * inner, 3) if of.is_gated else (inner, 2)
        rows, gate = self.tokens * of.top_k, of.hidden * of.experts
        sent = rows * of.hidden * size
        products = [
            Product(self.tokens, of.experts, of.hidden),
            Product(rows / local, up, of.hidden, local),
            Product(rows / local, of.hidden, inner, local),
        ]
        # Tokens in the order of experts, and back.
        streams = [*self.around(), self._activation(rows * inner * size)]
        streams.append(Stream(sent, 4, 4))
        kept = 2 * self.between_bytes + rows * (of.hidden + up + inner) * size
        if of.group_size:
            group = self.tokens if self.how.one_group else of.group_size
            slots, count = of.top_k * group, self.tokens / group
            mask = self.tokens * slots * size
            fill = Product(slots, of.hidden, group, count, is_weight=False)
            empty = Product(group, of.hidden, slots, count, is_weight=False)
            products = [products[0], fill, *products[1:], empty]
            streams.append(Stream(2 * mask, 8, 8))  # of 32 bits, operator by operator
            kept += 4 * mask + sent  # in 32 bits, in 16, and a gradient
        return self.unit(
            *("experts", gate),
            experts=matrices * of.hidden * inner * local,
            products=tuple(products),
            streams=tuple(streams),
            moves=(*self.moves(), Move("all_to_all", ("inner",), sent, 2, 2)),
            kept_bytes=kept,
        )

    def embedding(self) -> Unit:
        of = self.of
        whole = of.vocab_size * of.hidden
        streams = (Stream(self.row_bytes, 2, 3),)
        return self.unit(
            *("embedding", whole / self.layout.tensor),
            streams=streams,
            moves=self.moves()[-1:],
            is_repeated=False,
        )

    def head(self) -> Unit:
        of, tensor = self.of, self.layout.tensor
        words, whole = of.vocab_size / tensor, of.vocab_size * of.hidden
        logits = self.tokens * words * 4  # the loss is in 32 bits
        return self.unit(
            *("head", whole / tensor),
            products=(Product(self.tokens, words, of.hidden),),
            streams=(self.around()[0], Stream(logits, 3, 3)),
            moves=self.moves()[:1],
            kept_bytes=2 * logits,
            is_repeated=False,
        )
