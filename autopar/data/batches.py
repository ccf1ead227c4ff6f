"""Batches that are read ahead, placed where a step wants them."""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import jax
import numpy as np

from ..state.batch_tree import BatchTree
from ..state.examples import Examples, HostSource, is_tree_of_arrays
from ..steps.lowered_pipeline import LoweredPipeline
from ..steps.lowered_step import Lowered
from .placing import Placing, batch_types, is_on_hosts
from .sources import (
    ExampleReader,
    Position,
    Reader,
    batch_reader,
    is_by_number,
)

_log = logging.getLogger("autopar")
_PATIENCE_SECONDS = 0.1  # how soon a reader sees that nobody waits for it
_END = object()


class Batches:
    """The batches of a source, each placed as a step's plan has it, while others run.

        batches = autopar.Batches(data, step.lower(state, batch), seed=0)
        for batch in batches:
            state, loss = step(state, batch)
            position = batches.position  # what a checkpoint keeps beside this state

    A source is

    - arrays that hold all examples along dim 0, in a tree like the batch;
    - anything with `len(source)` and `source[i]`, an example that is a tree like the
      batch without its leading dim (a list, a torch or grain map dataset);
    - anything that is iterated for batches (a generator, a grain loader): in each
      process all rows, or only those that its devices hold, in their order.

    Of the first two each process reads the examples that its devices hold, and no
    others; they end after `num_epochs`, a last batch that is not full left out. Where
    the step runs on the hosts of a Ray cluster, these read what their devices hold of a
    source that is not in this process's memory; leaves are `DistributedArray`s then.

    Args:
      source: where the data comes from. An iterator is read from its start, or from
        where `get_state`, if it has that, says.
      like: the lowered step, whose arguments may be shapes; each batch is the argument
        of it that is a batch, a tuple of several, or a dict of them by name. Or such a
        tree of jax.ShapeDtypeStruct. Without sharding, and for a pipeline, which cuts
        its batch itself, leaves stay numpy arrays.
      position: where to go on, from `position` of a run before; the source and the seed
        are to be the same, the size of the batch, mesh and hosts may differ. What has
        no `set_state` is read up to there.
      seed: shuffles the examples, each epoch otherwise; None leaves them in order.
      num_epochs: how often the examples come; None for without end.
      prefetch: how many batches are read ahead by a thread; 0 reads when asked.
      on_hosts: whether the hosts of a Ray cluster read the examples; None as said
        above. The source is sent to them with cloudpickle, `np.memmap`s in it as
        paths; lists and arrays of this process are only sent if it is True.

    Raises:
      TypeError: no source, or `on_hosts` and it cannot be sent.
      ValueError: a source with fewer examples than a batch, or a position of another.
    """

    def __init__(
        self,
        source: Any,
        like: Any,
        *,
        position: Mapping[str, Any] | None = None,
        seed: int | None = None,
        num_epochs: int | None = None,
        prefetch: int = 2,
        on_hosts: bool | None = None,
    ) -> None:
        is_step = isinstance(like, Lowered | LoweredPipeline)
        tree = BatchTree.of(batch_types(like) if is_step else like)
        if not is_by_number(source):
            if seed is not None or num_epochs is not None or on_hosts:
                raise ValueError(
                    f"seed= and num_epochs= are for a source with examples by number, "
                    f"and so is on_hosts=, but {type(source).__name__} has no len() or "
                    f"no [i]; shuffle and repeat in it."
                )
            placing = Placing.of(tree)
            self._reader: Reader = batch_reader(source, placing, position)
        else:
            examples = Examples(source, tree, seed)
            end = num_epochs * examples.length if num_epochs else None
            sent = None
            if on_hosts or (on_hosts is None and is_step and is_on_hosts(like)):
                sent = host_source(examples, prefetch, end, is_asked=bool(on_hosts))
            if sent is None:
                batch_at = partial(Placing.of(tree).batch_at, examples)
            else:
                batch_at, prefetch = sent.batch, 0
            self._reader = ExampleReader.at(examples, batch_at, end, position)
        self._position = self._reader.position
        self._ahead = _Ahead(self._reader, prefetch) if prefetch else None
        self._is_over = False
        if self._ahead is not None:
            weakref.finalize(self, self._ahead.stop)

    @property
    def position(self) -> Position:
        """Where to go on after the batch that was given last; made of JSON."""
        return self._position

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        """The next batch.

        Raises:
          StopIteration: the source ended.
          Exception: what the source raised, with its traceback.
          ValueError: the source gave other trees, shapes or dtypes than planned for.
        """
        if self._is_over:
            raise StopIteration
        with ExitStack() as undo:
            undo.callback(self.close)
            if self._ahead is None:
                batch = self._reader.read()
                self._position = self._reader.position
            else:
                batch, self._position = self._ahead.take()
            undo.pop_all()
        return batch

    def close(self) -> None:
        """Read no further; what was read ahead is dropped."""
        self._is_over = True
        if self._ahead is not None:
            self._ahead.stop()

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Ahead:
    """A thread that reads batches with their positions, a few before they are taken."""

    def __init__(self, reader: Reader, number: int) -> None:
        self._found: queue.Queue[Any] = queue.Queue(number)
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(reader,), name="autopar batches", daemon=True
        )
        self._thread.start()

    def take(self) -> tuple[Any, Position]:
        """The next batch, and the position behind it."""
        found = self._found.get()
        if found is _END:
            raise StopIteration
        if isinstance(found, BaseException):
            raise found
        return found

    def stop(self) -> None:
        """Ends the thread when the source has given what it is asked for."""
        self._is_stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(10 * _PATIENCE_SECONDS)

    def _run(self, reader: Reader) -> None:
        while not self._is_stopped.is_set():
            try:
                found: Any = reader.read(), reader.position
            except StopIteration:
                found = _END
            except BaseException as error:
                found = error  # raised where the batch is waited for
            self._put(found)
            if not isinstance(found, tuple):
                return

    def _put(self, found: Any) -> None:
        while not self._is_stopped.is_set():
            try:
                self._found.put(found, timeout=_PATIENCE_SECONDS)
            except queue.Full:
                continue
            return


def host_source(
    examples: Examples, num_ahead: int, end: int | None, is_asked: bool
) -> HostSource | None:
    """What hosts read the examples with; None where this process does it.

    It does, unless it `is_asked` to leave it to them, where examples are in its memory
    or cannot be sent.

    Raises:
      TypeError: hosts are asked to, and the source cannot be sent.
    """
    if not is_asked and _is_in_memory(examples.source):
        return None
    from autopar.runtime.ray_sources import packed

    try:
        sent = packed(examples)
    except TypeError as error:
        if is_asked:
            raise
        _log.warning("this process reads the examples for all hosts: %s", error)
        return None
    return HostSource(examples, sent, num_ahead, end)


def _is_in_memory(source: Any) -> bool:
    if is_tree_of_arrays(source):
        leaves = jax.tree.leaves(source)
        in_memory = (
            isinstance(leaf, jax.Array)
            or (isinstance(leaf, np.ndarray) and not isinstance(leaf, np.memmap))
            for leaf in leaves
        )
        return any(in_memory)
    return isinstance(source, list | tuple)
