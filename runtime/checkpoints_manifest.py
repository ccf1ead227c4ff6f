"""The manifest of a checkpoint: what it holds, and a checksum for every file of it.

It is the last file of a checkpoint, so one that has none was not written to its end.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from autopar.errors import CheckpointError

from .checkpoint import UNFINISHED, data_type
from .named_leaves import Names
from .ray_files import doubted_files
from .stored_arrays import Digest, digest_of_file, file_problem

NAME = "autopar_manifest.json"
_FORMAT = 1
_FEW_BYTES = 256 << 20  # read here in less time than hosts need to start
# Orbax writes these when all else is there, and reads nothing of the state from them.
_WRITTEN_LATER = (NAME, "_CHECKPOINT_METADATA", "commit_success.txt")


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
    versions: Mapping[str, str]


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
    return Manifest(step, position, kinds, {}, _versions())


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
        "versions": dict(manifest.versions),
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
        content["versions"],
    )


def check_files(directory: Path, manifest: Manifest, on_hosts: bool = False) -> None:
    """Reads the files of a checkpoint, in several processes each its share of them.

    Args:
      directory: of the checkpoint.
      manifest: what it says of itself.
      on_hosts: whether hosts of a Ray cluster are to read it: they do this, too, if it
        is large.

    Raises:
      DamagedCheckpoint: one is missing or has another size or checksum.
      OSError: a host finds it so, and this process does not.
    """
    names = sorted(manifest.files)[jax.process_index() :: jax.process_count()]
    num_bytes = sum(size for size, _ in manifest.files.values())
    doubted: dict[str, str] | None = None
    if on_hosts and num_bytes > _FEW_BYTES:
        doubted = doubted_files(directory, manifest.files)
    for name in names if doubted is None else doubted:
        if problem := file_problem(directory / name, manifest.files[name]):
            raise DamagedCheckpoint(problem)
    if doubted:
        raise OSError(
            f"all hosts must see the files of {directory} as this process does, but "
            f"one of them says: {next(iter(doubted.values()))}"
        )


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
