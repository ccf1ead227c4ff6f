"""Run a program on the devices of this process, and perhaps of others besides.

Under `jax.distributed` each process plans, and all come to the same plan. Before a
program that spans several processes is compiled, each tells the others through JAX's
key-value store what it is about to run: differences are errors, not hangs.

JAX's C++ makes calls from arrays to the user's trees. What needs Python (a plan, moving
arguments, callbacks) is asked for once for each kind of arguments; calls that need none
of it are known to C++ from then on by a key of all that is no array, and by the types
and shardings of their arrays.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from autopar.lowering.programs import (
    CONCRETE_ARRAY,
    SignatureChanged,
    SpmdProgram,
    bits_of,
    call_in_cpp,
    distributed_store,
    is_checking_values,
    is_traced,
    path_in_cpp,
)
from autopar.state.distributed_array import (
    AbstractDistributedArray,
    DistributedArray,
    abstract_leaf,
    gathered,
)

_NO_DATA = (
    "A step runs on arrays, but got a jax.ShapeDtypeStruct among its arguments; use "
    "step.plan(...) or step.lower(...), which need no data."
)
_WEAK_SCALARS = (int, float, complex)
_TAKEN = (jax.Array, np.ndarray, np.generic, bool, *_WEAK_SCALARS)
_HELD = (jax.Array, DistributedArray)
_weak_type = attrgetter("aval.weak_type")
_is_committed = attrgetter("committed")
_SHAPES = (jax.ShapeDtypeStruct, AbstractDistributedArray)
# Two threads must start their steps in one order on all devices, or these wait for
# each other in collectives of different steps.
DISPATCH = threading.Lock()
TIMEOUT_SECONDS = 300.0  # for the slowest process to plan
_NUMBERS = itertools.count()  # all processes make their programs in one order
_log = logging.getLogger("autopar")


class LocalExecutable:
    """A compiled program and its calls, which never trace or compile again.

    A jitted function would: an array's type names the mesh it lies on, so a fresh array
    and the one that a step returned are different types to it.
    """

    def __init__(self, program: SpmdProgram) -> None:
        self.program = program
        check_clients(program)
        self._compiled = program.compile()
        self._has_told = False
        self._weak_types = tuple(t.weak_type for t in program.argument_types)

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        """Flat outputs of one step.

        Leaves on other devices or in other shardings are moved first, those in chunks
        through this process. The same buffer may come several times: all but the first
        are copied before they are donated.

        Raises:
          TypeError: a leaf that is a shape only.
          SignatureChanged: other shapes, dtypes or weak types than those planned for.
          RuntimeError: as JAX's own, if a donated buffer is used again.
        """
        kinds = set(map(type, leaves))
        if kinds == {CONCRETE_ARRAY}:  # the same checks, without loops of Python's
            is_deleted = any(map(CONCRETE_ARRAY.is_deleted, leaves))
            is_weak = tuple(map(_weak_type, leaves))
        elif is_traced(leaves):
            return self._run_traced(leaves)
        else:
            is_deleted = any(isinstance(x, _HELD) and x.is_deleted() for x in leaves)
            is_weak = tuple(map(_is_weak, leaves))
        # XLA's CPU client does not survive a deleted buffer of several devices.
        if is_deleted:
            raise _deleted_error(self._deleted(leaves))
        if is_weak != self._weak_types:
            raise SignatureChanged
        if any(issubclass(kind, DistributedArray) for kind in kinds):
            if not self._fits(leaves):
                raise SignatureChanged
            return self._run(self._moved(leaves))
        try:
            return self._run(leaves)
        except TypeError:
            if any(isinstance(leaf, _SHAPES) for leaf in leaves):
                raise TypeError(_NO_DATA) from None
            if self._fits(leaves):
                raise
            raise SignatureChanged from None
        except ValueError:
            if self._is_in_place(leaves):
                raise
        return self._run(self._moved(leaves))

    @property
    def is_direct(self) -> bool:
        """Whether a call needs no more than the program."""
        program = self.program
        are_plain = all(type(bits_of(x)) is CONCRETE_ARRAY for x in program.constants)
        return program.host_calls is None and are_plain

    def takes(self, leaves: Sequence[Any]) -> bool:
        """Whether the program runs on these leaves as they are."""
        return (
            all(isinstance(leaf, _TAKEN) for leaf in leaves)
            and not is_traced(leaves)
            and tuple(map(_is_weak, leaves)) == self._weak_types
            and self._fits(leaves)
            and self._is_in_place(leaves)
        )

    def _run(self, leaves: Sequence[Any]) -> list[Any]:
        given = cut_on_host(leaves, self.program.shardings)
        donated = self.program.donated
        if donated and has_repeats(given):
            given = self.program.without_repeats(given)
        if is_checking_values():  # the function is run on them again if it fails
            for position in donated:
                given[position] = jax.numpy.copy(given[position])
        return self.program.watched(lambda: self._dispatch(given))

    def _dispatch(self, leaves: Sequence[Any]) -> list[Any]:
        with DISPATCH:
            return self._compiled(self.program.constants, *leaves)

    def _moved(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves where the plan has them; says so the first time.

        Raises:
          ValueError: a leaf on another platform, which each step would copy.
        """
        misplaced = [
            (path, leaf, home)
            for path, leaf, home in zip(
                self.program.paths, leaves, self.program.shardings, strict=True
            )
            if not _is_at_home(leaf, home)
        ]
        for path, leaf, home in misplaced:
            if isinstance(leaf, jax.Array):
                check_platform(path, leaf.sharding.device_set, home.device_set)
        if misplaced and not self._has_told:
            self._has_told = True
            path, leaf, home = misplaced[0]
            _log.info(
                "%s: moved %d arrays of %d bytes to where its plan has them, first %s "
                "from %s to %s; so does every call that brings them elsewhere",
                self.program.jitted.__name__,
                len(misplaced),
                sum(leaf.nbytes for _, leaf, _ in misplaced),
                path,
                _place(leaf, home),
                home.spec,
            )
        once = self.program.without_repeats(leaves)
        homes = self.program.shardings
        whole = map(gathered, map(seen_by_host, once, homes), homes)
        return jax.device_put(list(whole), list(homes))

    def _run_traced(self, leaves: Sequence[Any]) -> list[Any]:
        """Inside another JAX transformation, which a compiled program cannot join."""
        if not self._fits(leaves):
            raise SignatureChanged
        return self.program.jitted(self.program.constants, *leaves)

    def _fits(self, leaves: Sequence[Any]) -> bool:
        """Whether the leaves have the shapes and dtypes planned for."""
        given = (jax.typeof(abstract_leaf(leaf)) for leaf in leaves)
        types = zip(given, self.program.argument_types, strict=True)
        return all((a.shape, a.dtype) == (b.shape, b.dtype) for a, b in types)

    def _is_in_place(self, leaves: Sequence[Any]) -> bool:
        """Whether every committed leaf already lies where the plan wants it."""
        return all(map(_is_at_home, leaves, self.program.shardings))

    def _deleted(self, leaves: Sequence[Any]) -> list[tuple[str, Any]]:
        """Paths and leaves whose buffers are gone."""
        return [
            (path, leaf)
            for path, leaf in zip(self.program.paths, leaves, strict=True)
            if isinstance(leaf, _HELD) and leaf.is_deleted()
        ]


def run_once(program: SpmdProgram, leaves: Sequence[Any]) -> list[Any]:
    """Flat outputs of a program that donates nothing; leaves may lie anywhere.

    Raises:
      TypeError: a leaf that is a shape only.
    """
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        raise TypeError(_NO_DATA)
    whole = map(gathered, leaves, program.shardings)
    placed = jax.device_put(list(whole), list(program.shardings))

    def dispatch() -> list[Any]:
        with DISPATCH:
            return program.compile()(program.constants, *placed)

    return program.watched(dispatch)


def check_platform(path: str, devices: Set[Any], home_devices: Set[Any]) -> None:
    """Does nothing if an array on `devices` may go to a mesh of `home_devices`.

    Raises:
      ValueError: it lies on another platform, which each step would copy.
    """
    (there,) = {device.platform for device in devices}
    (here,) = {device.platform for device in home_devices}
    if there != here:
        raise ValueError(
            f"Arrays must lie on the platform of the mesh, which is {here!r}, but "
            f"{path} lies on {there!r}; move it once with jax.device_put, or choose "
            f"the devices with mesh=jax.sharding.Mesh(devices, names)."
        )


def _is_at_home(leaf: Any, home: jax.sharding.Sharding) -> bool:
    """Whether a leaf need not be moved; one that is not committed goes by itself."""
    if isinstance(leaf, DistributedArray):
        return False
    return (
        not isinstance(leaf, jax.Array)
        or not leaf.committed
        or leaf.sharding.is_equivalent_to(home, leaf.ndim)
    )


def cut_on_host(
    leaves: Sequence[Any], homes: Sequence[jax.sharding.Sharding]
) -> list[Any]:
    """The leaves, those that nobody has put anywhere `seen_by_host`."""
    try:
        if all(map(_is_committed, leaves)):
            return list(leaves)
    except AttributeError:  # not all are arrays
        pass
    return [
        leaf if getattr(leaf, "committed", True) else seen_by_host(leaf, home)
        for leaf, home in zip(leaves, homes, strict=True)
    ]


def seen_by_host(leaf: Any, home: jax.sharding.Sharding) -> Any:
    """An array of one CPU that is to be cut, as numpy's.

    To cut its own arrays JAX compiles a program for each shape, which in a first call
    takes longer than planning.
    """
    if type(leaf) is not CONCRETE_ARRAY or home.is_fully_replicated:
        return leaf
    devices = leaf.sharding.device_set
    is_of_cpu = {device.platform for device in devices} == {"cpu"}
    return np.asarray(leaf) if len(devices) == 1 and is_of_cpu else leaf


def _is_weak(leaf: Any) -> bool:
    """Whether a leaf leaves its dtype to what it meets, as Python's numbers do."""
    return getattr(leaf, "weak_type", type(leaf) in _WEAK_SCALARS)


def _place(leaf: Any, home: jax.sharding.NamedSharding) -> str:
    """Where a leaf lies, as far as it differs from `home`."""
    if isinstance(leaf, DistributedArray):
        return f"{len(leaf.chunks)} chunks"
    spec = getattr(leaf.sharding, "spec", leaf.sharding)
    is_here = leaf.sharding.device_set == home.device_set
    return str(spec) if is_here else f"{spec} on {leaf.sharding.num_devices} devices"


def _deleted_error(deleted: Sequence[tuple[str, Any]]) -> RuntimeError:
    """JAX's own words, and which argument it is and what to do."""
    paths = [path for path, _ in deleted]
    some = ", ".join(paths[:3]) + (", ..." if len(paths) > 3 else "")
    leaf = deleted[0][1]
    return RuntimeError(
        f"Array has been deleted with shape={leaf.dtype.name}{list(leaf.shape)}: each "
        f"array may be donated once, but {some} was given to a parallelized function "
        f"before and its memory now holds the next state. Pass the state that the last "
        f"call returned, or pass donate_argnums=() to autopar.parallelize to keep both."
    )


def has_repeats(leaves: Sequence[Any]) -> bool:
    """Whether one object is several of the leaves."""
    return len(set(map(id, leaves))) < len(leaves)


def check_clients(program: SpmdProgram) -> None:
    """Does nothing if the other processes that a program spans have the same one.

    Raises:
      RuntimeError: one has another mesh or program; says what each has.
      TimeoutError: one did not come to this point.
    """
    store, mesh = distributed_store(), program.mesh
    if store is None or not isinstance(mesh, Mesh):
        return
    clients = sorted({device.process_index for device in mesh.devices.flat})
    if len(clients) == 1:
        return
    name, number = program.jitted.__name__, next(_NUMBERS)

    def key(client: int) -> str:
        return f"autopar/program/{number}/{client}"

    ours = _described(program, mesh)
    store.key_value_set(key(jax.process_index()), json.dumps(ours))
    found: dict[int, dict[str, Any]] = {}
    for client in clients:
        try:
            text = store.blocking_key_value_get(key(client), int(TIMEOUT_SECONDS * 1e3))
        except jax.errors.JaxRuntimeError as error:
            raise TimeoutError(
                f"All processes of a mesh must run {name}, but process {client} did "
                f"not come to it in {TIMEOUT_SECONDS:g} s; see what it says, and let "
                f"all call the same functions in the same order."
            ) from error
        found[client] = json.loads(text)
    if any(each != ours for each in found.values()):
        shown = "; ".join(
            f"process {client} has {each['name']} on mesh {each['mesh']}, program "
            f"{each['program'][:8]}, devices {each['devices'][:8]}"
            for client, each in found.items()
        )
        raise RuntimeError(
            f"All processes of a mesh must run one program, but they differ: {shown}. "
            f"Give all the same functions, options and versions; or plan once, keep "
            f"it with plan.save(...), and give all that plan."
        )


def _described(program: SpmdProgram, mesh: Mesh) -> dict[str, str]:
    """What must be equal: names to be read, and digests."""
    ids = np.array([device.id for device in mesh.devices.flat])
    return {
        "name": program.jitted.__name__,
        "mesh": ";".join(f"{axis}:{size}" for axis, size in mesh.shape.items()),
        "program": hashlib.sha256(program.lower().as_text().encode()).hexdigest(),
        "devices": hashlib.sha256(ids.tobytes()).hexdigest(),
    }


MISSED = object()
"""Instead of a result: the call is to be made another way."""


KeyAndLeaves = tuple[Any, Sequence[Any]]


class NotDirect(Exception):
    """Calls of a function take more than its program."""


@dataclass(frozen=True, eq=False)
class ReadyCall:
    """What runs a call: a program, and the tree of its results.

    Taken apart and made again, that tree is what the function returns.
    """

    executable: LocalExecutable
    tree_of: Callable[[Sequence[Any]], Any]


class DirectCalls:
    """Calls of one function, by whichever of its programs takes them as they are.

    Calls of equal keys differ in their leaves only. `parted` gives both, or None where
    that takes Python: it is for the caller then, who asks `by_key`. `ready` says what
    is ready to run a call of this key and leaves, or None; it raises `NotDirect` where
    calls always take Python, and is not asked again.
    """

    def __init__(
        self,
        name: str,
        parted: Callable[[Sequence[Any], Mapping[str, Any]], KeyAndLeaves | None],
        ready: Callable[[Any, Sequence[Any]], ReadyCall | None],
    ) -> None:
        self._parted, self._ready = parted, ready
        self._is_stopped = False
        self._has_donated = False  # some program that is known by now
        self._call = call_in_cpp(name, [0], [], self._first_call, seen_by_host)

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result, or MISSED, before anything was done.

        Raises:
          ValueError: a static argument that cannot be hashed.
        """
        if self._is_stopped or is_checking_values():
            return MISSED
        found = self._parted(args, kwargs)
        return MISSED if found is None else self.by_key(*found)

    def by_key(self, key: Any, leaves: Sequence[Any]) -> Any:
        """The same for a call that has been taken apart."""
        if self._is_stopped or is_checking_values() or not self._may_run(leaves):
            return MISSED
        with DISPATCH:
            return self._call(key, leaves)

    def _may_run(self, leaves: Sequence[Any]) -> bool:
        """XLA's CPU client does not survive deleted buffers of several devices."""
        if _has_deleted(leaves):
            return False
        return not (self._has_donated and has_repeats(leaves))

    def _first_call(self, key: Any, leaves: Sequence[Any]) -> tuple[Any, Any, bool]:
        """The result, how C++ makes the next such call, and whether it cannot."""
        missed = MISSED, None, True
        try:
            ready = self._ready(key, leaves)
        except NotDirect:
            self._is_stopped = True
            return missed
        except TypeError:  # a leaf that is no array: the other way names it
            return missed
        if ready is None or not ready.executable.takes(leaves):
            return missed
        program = ready.executable.program
        if program.donated and has_repeats(leaves):
            return missed
        self._has_donated = self._has_donated or bool(program.donated)
        compiled = program.compile()
        try:
            given = cut_on_host(leaves, program.shardings)
            outputs = compiled(program.constants, *given)
        except (TypeError, ValueError):  # such as a memory layout of its own
            return missed
        results = ready.tree_of(outputs)
        path = path_in_cpp(compiled, program.constants, leaves, outputs, results)
        return jax.tree.map(lambda leaf: leaf, results), path, path is None


def _has_deleted(leaves: Sequence[Any]) -> bool:
    try:  # one pass, without a loop of Python's
        return any(map(CONCRETE_ARRAY.is_deleted, leaves))
    except TypeError:
        others = [leaf for leaf in leaves if type(leaf) is not CONCRETE_ARRAY]
    if is_traced(others):
        return False
    arrays = [leaf for leaf in leaves if isinstance(leaf, CONCRETE_ARRAY)]
    arrays += [leaf for leaf in others if isinstance(leaf, jax.Array)]
    return any(leaf.is_deleted() for leaf in arrays)
