"""Compiles exported programs in child processes, and keeps what came out.

JAX's persistent cache cannot read programs of absent devices back, so what is needed of
one (its text, bytes and seconds) is kept in a folder of autopar's cache.
"""

from __future__ import annotations

import atexit
import gzip
import hashlib
import json
import logging
import os
import pickle
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import jax

from ..cache_folder import cache_folder, store_file
from ..errors import InfeasiblePlanError, TargetError
from .compilers import Compilers, needed
from .target import Target

# Without a device nothing can be timed, and Triton's products cannot be chosen untimed.
_FLAGS = {"cuda": ["--xla_gpu_autotune_level=0", "--xla_gpu_enable_triton_gemm=false"]}
_USERS_FLAGS = {"cuda": ("XLA_FLAGS", "--xla_gpu_"), "tpu": ("LIBTPU_INIT_ARGS", "--")}
# Or libtpu asks a server that only machines with TPUs have what they are.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_CHILD = Path(__file__).parent / "compile_child.py"
_MOST_KEPT = 256
_log = logging.getLogger("autopar")

# A spec's entries, and a kind of memory; None where that is the partitioner's choice.
Placed = tuple[tuple[Any, ...], str | None] | None


@dataclass(frozen=True)
class Request:
    """A program to compile, as `jax.export` wrote it, and how its arrays lie.

    `constants`, `inputs` and `outputs` have a spec and a kind of memory for each array;
    `donated` are positions among the inputs.
    """

    name: str
    code: bytes
    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    constants: Sequence[Placed]
    inputs: Sequence[Placed]
    outputs: Sequence[Placed]
    donated: Sequence[int]
    options: Mapping[str, str]


@dataclass(frozen=True, eq=False)
class TargetExecutable:
    """A program compiled for devices that are not here: to be read, not to be run."""

    target: Target
    name: str
    text: str
    memory: Mapping[str, int]
    cost: Mapping[str, float]
    compile_seconds: float
    was_kept: bool = False

    def as_text(self) -> str:
        """The optimized HLO module."""
        return self.text

    def memory_analysis(self) -> Any:
        """Bytes on one device, with the fields of `jax.stages.Compiled`'s."""
        return SimpleNamespace(**self.memory)

    def cost_analysis(self) -> dict[str, float]:
        """What the compiler says of flops and bytes; it counts a loop's body once."""
        return dict(self.cost)


def refuse_call(target: str) -> NoReturn:
    """Says where a program compiled for a target would run.

    Raises:
      RuntimeError: always.
    """
    here = jax.devices()
    raise RuntimeError(
        f"A compiled program runs on the devices that it was compiled for, which are "
        f"{target}, but this process has {len(here)} x {here[0].device_kind}; call the "
        f"parallelized function to run it here."
    )


def compile_for(
    target: Target, request: Request, limit_seconds: float = inf
) -> TargetExecutable:
    """Compile a program for a target, or find it among those kept.

    Raises:
      TargetError: the compilers are not installed, or refuse the program.
      InfeasiblePlanError: they refuse it as too large for a device.
      TimeoutError: it took longer than `limit_seconds`.
    """
    compilers = needed(target.platform)
    kept = _kept(target, request)
    reply: dict[str, Any] | None = None
    if kept is not None and kept.exists():
        try:
            reply = json.loads(gzip.decompress(kept.read_bytes()))
        except (OSError, EOFError, ValueError):
            kept.unlink(missing_ok=True)
    was_kept = reply is not None
    if reply is None:
        sent = vars(request) | {
            "platform": target.platform,
            "topology": target.topology,
            "places": target.places(request.axis_sizes),
            "options": dict(request.options),
        }
        _log.info("compiling %s for %s", request.name, target)
        reply = _child(compilers).ask(sent, limit_seconds)
        if "RESOURCE_EXHAUSTED" in reply.get("error", ""):
            raise InfeasiblePlanError(
                f"{request.name} must fit the {target.memory_bytes:,} B of one device "
                f"of {target}, but its compiler says: {reply['error']} Give a lower "
                f"memory_budget (--budget), more devices, or a smaller batch.",
                least_budget_bytes=_largest_size(reply["error"]),
            )
        if "error" in reply:
            raise TargetError(
                f"{request.name} must compile for {target}, but its compiler says: "
                f"{reply['error']}"
            )
        if kept is not None:
            store_file(kept, json.dumps(reply), _MOST_KEPT)
    given = reply["text"], reply["memory"], reply["cost"], reply["seconds"]
    return TargetExecutable(target, request.name, *given, was_kept)


def _largest_size(message: str) -> int | None:
    """The largest of the sizes such as `17.88G` in a compiler's message, in bytes."""
    sizes = re.findall(r"\b(\d+(?:\.\d+)?)([KMGT])\b", message)
    found = (
        int(float(size) * 1024 ** (1 + "KMGT".index(unit))) for size, unit in sizes
    )
    return max(found, default=None)


def _kept(target: Target, request: Request) -> Path | None:
    """Where a compiled program is kept; nowhere, if the cache is off."""
    folder = cache_folder()
    if folder is None:
        return None
    flags = _flags(target.platform)
    places = target.places(request.axis_sizes)
    text = repr((jax.__version__, flags, target, places, vars(request)))
    digest = hashlib.sha256(text.encode()).hexdigest()[:40]
    return folder / "compiled" / f"{digest}.json.gz"


def _flags(platform: str) -> str:
    """What the child's XLA is told: what absent devices take, then the user's own."""
    variable, start = _USERS_FLAGS[platform]
    own = os.environ.get(variable, "").split()
    flags = [*_FLAGS.get(platform, ()), *(f for f in own if f.startswith(start))]
    return " ".join(flags)


@cache
def _child(compilers: Compilers) -> _Child:
    return _Child(compilers)


class _Child:
    """The process that compiles for one platform, started at the first request."""

    def __init__(self, compilers: Compilers) -> None:
        self._compilers, self._process = compilers, None
        self._lock = threading.Lock()
        self._said = tempfile.TemporaryFile()
        atexit.register(self._end)

    def ask(self, request: Mapping[str, Any], limit: float) -> dict[str, Any]:
        """The reply to a request; the process is ended where it takes too long."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = self._started()
            process = self._process
            is_late = threading.Event()

            def end() -> None:
                is_late.set()
                process.kill()

            timer = threading.Timer(limit, end)
            timer.daemon = True
            if limit < inf:
                timer.start()
            try:
                return self._exchange(process, pickle.dumps(dict(request)))
            except (OSError, EOFError):
                process.wait()
                if is_late.is_set():
                    raise TimeoutError(
                        f"{request['name']} was to compile within {limit:g} s, but did "
                        f"not; allow more seconds."
                    ) from None
                raise TargetError(
                    f"The process that compiles for {self._compilers.platform} must "
                    f"answer, but ended with code {process.returncode}: {self._last()}"
                ) from None
            finally:
                timer.cancel()

    @staticmethod
    def _exchange(process: Any, body: bytes) -> dict[str, Any]:
        process.stdin.write(len(body).to_bytes(8) + body)
        process.stdin.flush()
        length = process.stdout.read(8)
        if len(length) < 8:
            raise EOFError
        return json.loads(process.stdout.read(int.from_bytes(length)))

    def _started(self) -> Any:
        platform = self._compilers.platform
        paths = [*self._compilers.paths(), *(path for path in sys.path if path)]
        environment = {
            **os.environ,
            **_ENVIRONMENT,
            "PYTHONPATH": os.pathsep.join(paths),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "",
            _USERS_FLAGS[platform][0]: _flags(platform),
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "JAX_ENABLE_COMPILATION_CACHE": "false",
            "JAX_ENABLE_X64": "true",  # exported programs say themselves what is wide
        }
        # -P: the folder of the script holds modules that are none of the child's.
        return subprocess.Popen(
            [sys.executable, "-P", str(_CHILD)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
        )

    def _last(self) -> str:
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return " ".join(lines[-3:]) or "no message"

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
