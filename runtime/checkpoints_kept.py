"""A kept series of checkpoints: written beside the training, checked when restored.

Orbax writes the arrays, in the background and into a temporary directory that it
renames. Ours is what it lacks: a manifest of what a checkpoint holds with a checksum
for every file, the last file before that rename, and the way back to the checkpoint
before where the newest one fails. Orbax's CheckpointManager puts a state one directory
deeper, where neither plain Orbax nor an older autopar finds it by its step.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import operator
import os
import re
import shutil
import warnings
from collections.abc import Container, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import multihost_utils

from autopar.errors import CheckpointError

from .checkpoint import (
    MARK,
    UNFINISHED,
    NamedLeaves,
    Names,
    check_alike,
    data_type,
    import_orbax,
    orbax_save,
    restore,
    stored_leaves,
)
from .stored_arrays import Digest, digest_of_file, file_problem

NAME = "autopar_manifest.json"
_FORMAT = 1
# Orbax writes these when all else is there, and reads nothing of the state from them.
_WRITTEN_LATER = (NAME, "_CHECKPOINT_METADATA", "commit_success.txt")
_REMOVED = ".removed"
_LEFTOVER = re.compile(rf"\d+({re.escape(UNFINISHED)}.*|{re.escape(_REMOVED)})")


class DamagedCheckpoint(CheckpointError):
    """A file is not what was written."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    `leaves` are the shape and dtype of each leaf by its joined name, `files` the size
    in bytes and the SHA-256 of each file by its path in the checkpoint.
    """

    step: int
    data_position: Any
    leaves: Mapping[str, jax.ShapeDtypeStruct]
    files: Mapping[str, tuple[int, str]]


@dataclass(frozen=True)
class Checkpoint:
    """What was restored: the state, its step, and the position in the data with it."""

    step: int
    state: Any
    data_position: Any


class Checkpoints:
    """The newest checkpoints of a training, in one directory on a file system.

        with autopar.Checkpoints("run", keep=3) as checkpoints:
            for number in range(1000):
                state, loss = step(state, next(batches))
                if number % 100 == 99:
                    checkpoints.save(number, state, data_position=batches.position)

    Each is a directory named by its step, which `autopar.restore` and Orbax read too.
    Under `jax.distributed` all processes make the same calls, on a directory that they
    share; each writes the shards it holds, and so do the hosts of a Ray cluster. One
    training at a time may use a directory.

    Args:
      directory: where they are; made if need be.
      keep: how many finished checkpoints stay; None for all. While one is written there
        is one more.
      files: "process": few large files for each process. "shard": a file for each shard
        of each array, with nothing else in it.

    Raises:
      ImportError: Orbax is not installed.
      ValueError: `keep` is below one, or `files` is neither.
      NotImplementedError: a bucket.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        files: Literal["process", "shard"] = "process",
    ) -> None:
        if keep is not None and keep < 1:
            raise ValueError(
                f"A series keeps 1 checkpoint or more, but got keep={keep}; give None "
                f"to keep all of them."
            )
        if files not in ("process", "shard"):
            raise ValueError(
                f"Files are cut by 'process' or by 'shard', but got files={files!r}."
            )
        if "://" in os.fspath(directory):
            raise NotImplementedError(
                f"A series of checkpoints is kept on a file system, but {directory} is "
                f"a bucket; mount it, or write single ones with autopar.save."
            )
        self.directory, self.keep = Path(os.path.abspath(directory)), keep
        self._orbax = import_orbax("autopar.Checkpoints")
        self._is_ocdbt = files == "process"
        self._writer: Any = None  # of what is being written
        self._pending: Manifest | None = None
        self._digests: dict[str, Digest] = {}  # of files that workers wrote
        self._damaged = set[int]()  # refused by `restore`
        self._is_clean = False

    def save(self, step: int, state: Any, *, data_position: Any = None) -> None:
        """Begin to write a state; what was begun before is waited for.

        When this returns, the state may be donated: its values were copied. Errors of
        the writing are raised by the next call of any method, and leave what was saved
        before as it is.

        Args:
          step: the number of the step, above those that are there.
          state: any tree of arrays, DistributedArrays, numbers and PRNG keys.
          data_position: anything JSON has: where the data goes on after this state.

        Raises:
          OSError: the checkpoint before could not be written.
          ValueError: a step that does not go up, or a state that `autopar.save`
            refuses; also its TypeError and RuntimeError.
        """
        self.wait()
        step, newest = operator.index(step), self.latest()
        if step < 0:
            raise ValueError(f"Steps are counted from 0, but got step {step}.")
        if newest is not None and step <= newest:
            raise ValueError(
                f"The steps of a series go up, but {step} was to be saved after "
                f"{newest} in {self.directory}; use another directory, or remove the "
                f"later ones to go on from an earlier one."
            )
        stored = stored_leaves(state)
        pending = described(step, stored, data_position)
        if not self._is_clean:
            self._remove_leftovers()
            self._is_clean = True
        self._pending = pending
        self._digests.clear()
        handler, arguments = orbax_save(stored, self._digests, self._is_ocdbt)
        options = self._orbax.options.AsyncOptions(
            post_finalization_callback=self._write_manifest
        )
        self._writer = self._orbax.AsyncCheckpointer(handler, async_options=options)
        self._writer.save(
            self.directory / str(step),
            args=arguments,
            custom_metadata=MARK,
            force=step in self._damaged,
        )

    def wait(self) -> None:
        """Wait until what was begun is written, and remove what is not kept.

        Raises:
          OSError: it could not be written, e.g. as the disk is full.
        """
        if self._writer is None:
            return
        assert self._pending is not None, "a save was begun"
        step = self._pending.step
        try:
            self._writer.wait_until_finished()
        except Exception as error:
            self._remove_leftovers()
            self._is_clean = False
            newest = self.latest()
            left = "no other is there" if newest is None else f"that of {newest} stays"
            raise OSError(
                f"A checkpoint must be written to its end, but that of step {step} in "
                f"{self.directory} was not ({left}): {error}"
            ) from error
        finally:
            self._writer.close()
            self._writer = self._pending = None
        self._damaged.discard(step)
        self._remove_old()

    def steps(self) -> tuple[int, ...]:
        """The steps of all finished checkpoints, whether or not their files are good.

        What `restore` found to be damaged is left out.
        """
        found = (int(p.name) for p in self._directories() if (p / NAME).is_file())
        return tuple(sorted(set(found) - self._damaged))

    def latest(self) -> int | None:
        """The newest of `steps()`."""
        return max(self.steps(), default=None)

    def restore(self, like: Any, step: int | None = None) -> Checkpoint:
        """The newest good checkpoint, or that of `step`, placed as `like` says.

        Every file is read and compared with its checksum first. One that is unfinished,
        damaged or of another model is refused with a warning that says why, and the one
        before is tried; the next `save` removes it if it was damaged.

        Args:
          like: as for `autopar.restore`: `step.abstract_state(...)` of any plan, mesh
            or method, or any tree with the shardings wanted.
          step: this one and no other.

        Raises:
          FileNotFoundError: there is none.
          CheckpointError: none can be restored, or not that of `step`; says why.
          OSError: a save before could not be written.
        """
        self.wait()
        names = re.compile(rf"(\d+)({re.escape(UNFINISHED)}.*)?")
        entries = self.directory.iterdir() if self.directory.is_dir() else ()
        matches = [m for m in (names.fullmatch(p.name) for p in entries) if m]
        if step is not None:
            matches = [m for m in matches if int(m[1]) == step]
        if not matches:
            which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            raise FileNotFoundError(
                f"autopar.Checkpoints restores what it saved, but {which} is in "
                f"{self.directory}, which has those of {list(self.steps())}."
            )
        refused: list[str] = []
        for match in sorted(matches, key=lambda m: (int(m[1]), not m[2]), reverse=True):
            path = self.directory / match[0]
            try:
                found = self._restored(path, like)
            except CheckpointError as error:
                refused.append(str(error))
                continue
            if refused:
                warnings.warn(
                    f"The checkpoint of step {found.step} was restored, as newer ones "
                    f"cannot be: {'; '.join(refused)}.",
                    stacklevel=2,
                )
            return found
        raise CheckpointError(
            f"A checkpoint must be whole and of this model to be restored, but "
            f"{'; '.join(refused)}."
        )

    def close(self) -> None:
        """Wait for what was begun."""
        self.wait()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            self.close()
        except OSError as failed:
            if error is None:
                raise
            error.add_note(str(failed))  # it may well be the cause

    def _restored(self, path: Path, like: Any) -> Checkpoint:
        """The checkpoint at a path, which all processes find good.

        Raises:
          CheckpointError: it is refused; says why.
        """
        manifest, reason, is_damaged = None, None, False
        try:
            manifest = read_manifest(path)
            check_alike(str(path), NamedLeaves(like), manifest.leaves)
            check_files(path, manifest)
        except (ValueError, OSError) as error:
            is_damaged = isinstance(error, DamagedCheckpoint)
            reason = str(error).rstrip(".")
        is_damaged = _any_process(is_damaged)
        if _any_process(reason is not None):
            if is_damaged:
                self._damaged.add(int(path.name))
            raise CheckpointError(reason or f"another process cannot read {path}")
        assert manifest is not None, "there was no reason to refuse it"
        return Checkpoint(manifest.step, restore(path, like), manifest.data_position)

    def _write_manifest(self) -> None:
        """Called by Orbax when all files are there, before it renames the directory."""
        assert self._pending is not None, "a save was begun"
        name = f"{self._pending.step}{UNFINISHED}"
        (directory,) = self.directory.glob(f"{name}*")
        write_manifest(directory, self._pending, self._digests)

    def _directories(self) -> list[Path]:
        if not self.directory.is_dir():
            return []
        return [p for p in self.directory.iterdir() if p.name.isdecimal()]

    def _remove_old(self) -> None:
        """Removes what is damaged, and of the good ones all but the newest."""
        steps = self.steps()
        old = set(steps[: -self.keep] if self.keep else ()) | self._damaged
        for path in self._directories() if jax.process_index() == 0 else ():
            if int(path.name) in old:
                # Renamed first: half a checkpoint must not look like a whole one.
                removed = path.with_name(path.name + _REMOVED)
                path.rename(removed)
                shutil.rmtree(removed)
        self._damaged.clear()

    def _remove_leftovers(self) -> None:
        """Removes what a save or a removal that was cut off has left."""
        if jax.process_index() == 0 and self.directory.is_dir():
            for path in self.directory.iterdir():
                if _LEFTOVER.fullmatch(path.name):
                    # Threads of a save that failed may still be writing to it.
                    shutil.rmtree(path, ignore_errors=True)


def _any_process(is_so: bool) -> bool:
    """Whether it is so in any process; all of them ask at once."""
    if jax.process_count() == 1:
        return is_so
    return bool(multihost_utils.process_allgather(is_so).any())


def described(step: int, stored: Mapping[Names, Any], data_position: Any) -> Manifest:
    """The manifest of leaves that are about to be written, without its files.

    Raises:
      TypeError: the position in the data is not made of what JSON has.
    """
    try:
        position = json.loads(json.dumps(data_position))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"The position in the data is kept as JSON, but {data_position!r:.200} is "
            f"not made of numbers, texts, lists and dicts: {error}; give the "
            f"`position` of an autopar.Batches, or what your own source needs."
        ) from error
    kinds = {
        ".".join(n): jax.ShapeDtypeStruct(*data_type(x)) for n, x in stored.items()
    }
    return Manifest(step, position, kinds, {})


def write_manifest(
    directory: Path, manifest: Manifest, known: Mapping[str, Digest]
) -> None:
    """Adds the manifest to a directory that holds all other files of a checkpoint.

    Raises:
      FileNotFoundError: a file of those `known`, which other hosts wrote, is not there.
    """
    missing = [name for name in known if not (directory / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"The hosts must share the directory of a checkpoint, but this one does "
            f"not see {directory / missing[0]}, which another wrote; use a file system "
            f"that all of them mount."
        )
    content = {
        "format": _FORMAT,
        "step": manifest.step,
        "versions": _versions(),
        "data_position": manifest.data_position,
        "leaves": {
            name: {"shape": list(kind.shape), "dtype": np.dtype(kind.dtype).name}
            for name, kind in manifest.leaves.items()
        },
        "files": {
            name: {"bytes": size, "sha256": sha256}
            for name, (size, sha256) in {**_digests(directory, known), **known}.items()
        },
    }
    text = json.dumps({"sha256": _digest_of(content), **content}, indent=1)
    with (directory / f"{NAME}.tmp").open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(directory / f"{NAME}.tmp", directory / NAME)


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a finished checkpoint.

    Raises:
      DamagedCheckpoint: the manifest was altered.
      CheckpointError: there is no such checkpoint, it was not written to its end, or
        by a newer version of autopar.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not there")
    if UNFINISHED in directory.name or not (directory / NAME).is_file():
        raise CheckpointError(f"{directory} was not written to its end")
    try:
        content = json.loads((directory / NAME).read_bytes())
        is_whole = content.pop("sha256") == _digest_of(content)
    except (ValueError, KeyError, AttributeError, TypeError):
        is_whole, content = False, {}
    if not is_whole:
        raise DamagedCheckpoint(f"{directory / NAME} was altered after it was written")
    if content["format"] != _FORMAT:
        raise CheckpointError(
            f"{directory} has format {content['format']} of checkpoints, and this "
            f"version of autopar reads format {_FORMAT}"
        )
    return Manifest(
        content["step"],
        content["data_position"],
        {
            name: jax.ShapeDtypeStruct(
                tuple(kind["shape"]), jax.numpy.dtype(kind["dtype"])
            )
            for name, kind in content["leaves"].items()
        },
        {name: (f["bytes"], f["sha256"]) for name, f in content["files"].items()},
    )


def check_files(directory: Path, manifest: Manifest) -> None:
    """Reads the files of a checkpoint, in several processes each its share of them.

    Raises:
      DamagedCheckpoint: one is missing or has another size or checksum.
    """
    names = sorted(manifest.files)[jax.process_index() :: jax.process_count()]
    paths = [directory / name for name in names]
    written = [manifest.files[name] for name in names]
    with ThreadPoolExecutor() as threads:
        problems = [each for each in threads.map(file_problem, paths, written) if each]
    if problems:
        raise DamagedCheckpoint(problems[0])


def _digests(directory: Path, known: Container[str]) -> dict[str, Digest]:
    """The SHA-256 of the other files below a directory, by their path in it."""
    files = {
        path.relative_to(directory).as_posix(): path
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name not in _WRITTEN_LATER
    }
    return {
        name: digest_of_file(path) for name, path in files.items() if name not in known
    }


def _digest_of(content: Any) -> str:
    """The SHA-256 of JSON, however it is laid out."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _versions() -> dict[str, str]:
    found = {}
    for package in ("autopar", "jax", "orbax-checkpoint"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"  # autopar in a checkout
    return found
