"""A kept series of checkpoints: beside the training, whole, and checked when read."""

import json
import resource
import shutil
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.runtime import checkpoints_kept
from tests.marks import slow

Tree = Any
MANIFEST = "autopar_manifest.json"


def state_of(number: int) -> Tree:
    """A state in shards, whose values no other number has."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    rows = np.random.default_rng(number).standard_normal((16, 32), "f4")
    return {
        "w": jax.device_put(rows, NamedSharding(mesh, P("x"))),
        "count": jnp.int32(number),
    }


def assert_is(restored: autopar.Checkpoint, number: int) -> None:
    assert restored.step == number
    for ours, theirs in zip(
        jax.tree.leaves(restored.state), jax.tree.leaves(state_of(number)), strict=True
    ):
        assert ours.sharding == theirs.sharding
        np.testing.assert_array_equal(ours, theirs)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Iterator[autopar.Checkpoints]:
    with autopar.Checkpoints(tmp_path / "run", keep=3) as found:
        yield found


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of the steps 1 and 2."""
    path = tmp_path_factory.mktemp("two_steps") / "run"
    with autopar.Checkpoints(path, keep=3) as checkpoints:
        for number in (1, 2):
            position = {"samples": number}
            checkpoints.save(number, state_of(number), data_position=position)
    return path


@pytest.fixture
def saved(two_steps: Path, tmp_path: Path) -> Iterator[autopar.Checkpoints]:
    """A copy of them that a test may change."""
    shutil.copytree(two_steps, tmp_path / "run")
    with autopar.Checkpoints(tmp_path / "run", keep=3) as found:
        yield found


def files_of(checkpoint: Path) -> list[Path]:
    """What the state is read from, and the manifest."""
    others = ("_CHECKPOINT_METADATA", "commit_success.txt")
    files = (path for path in sorted(checkpoint.rglob("*")) if path.is_file())
    return [path for path in files if path.name not in others]


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_the_newest_are_kept_with_their_positions(
    checkpoints: autopar.Checkpoints,
) -> None:
    assert checkpoints.latest() is None
    for number in range(5):
        checkpoints.save(number, state_of(number), data_position={"samples": number})
    checkpoints.wait()
    assert checkpoints.steps() == (2, 3, 4)
    assert {path.name for path in checkpoints.directory.iterdir()} == {"2", "3", "4"}
    found = checkpoints.restore(state_of(0))
    assert_is(found, 4)
    assert found.data_position == {"samples": 4}
    assert_is(checkpoints.restore(state_of(0), step=3), 3)


@pytest.mark.parametrize("keep", [1, None])
def test_one_or_all_may_be_kept(keep: int | None, tmp_path: Path) -> None:
    with autopar.Checkpoints(tmp_path, keep=keep) as checkpoints:
        for number in range(3):
            checkpoints.save(number, state_of(number))
    assert checkpoints.steps() == ((2,) if keep else (0, 1, 2))


def test_training_goes_on_while_a_state_is_written(
    checkpoints: autopar.Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()
    write = checkpoints_kept.write_manifest

    def write_later(*args: Any) -> None:
        assert may_end.wait(60)
        write(*args)

    monkeypatch.setattr(checkpoints_kept, "write_manifest", write_later)
    step = autopar.parallelize(lambda state: jax.tree.map(lambda x: 2 * x, state))
    state = {**state_of(1), "numpy": np.ones(3)}
    checkpoints.save(1, state)
    state["numpy"][:] = 0
    expected = jax.tree.map(np.asarray, state_of(1))
    for _ in range(3):
        state = step({"w": state["w"], "count": state["count"]})
        state = jax.block_until_ready(state)
    assert checkpoints.latest() is None
    may_end.set()
    checkpoints.wait()
    np.testing.assert_array_equal(state["w"], 8 * expected["w"])
    found = checkpoints.restore({**state_of(0), "numpy": np.zeros(3)}).state
    np.testing.assert_array_equal(found.pop("numpy"), np.ones(3))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_each_is_one_that_autopar_restore_reads(saved: autopar.Checkpoints) -> None:
    found = autopar.restore(saved.directory / "1", state_of(0))
    jax.tree.map(np.testing.assert_array_equal, found, state_of(1))


def test_a_manifest_says_what_is_in_it(saved: autopar.Checkpoints) -> None:
    content = json.loads((saved.directory / "2" / MANIFEST).read_text())
    assert content["leaves"] == {
        "count": {"shape": [], "dtype": "int32"},
        "w": {"shape": [16, 32], "dtype": "float32"},
    }
    assert content["versions"]["jax"] == jax.__version__
    names = {path.name for path in files_of(saved.directory / "2")}
    assert {Path(name).name for name in content["files"]} == names - {MANIFEST}


class TestRefused:
    """Said in a warning that gives the reason; the one before is restored."""

    def restores_the_one_before(self, saved: autopar.Checkpoints, reason: str) -> None:
        with pytest.warns(UserWarning, match=f"step 1 was restored.*{reason}"):
            found = saved.restore(state_of(0))
        assert_is(found, 1)
        assert found.data_position == {"samples": 1}

    def test_one_byte_of_any_file_flipped(self, saved: autopar.Checkpoints) -> None:
        files = files_of(saved.directory / "2")
        assert len(files) > 5
        for path in files:
            content = path.read_bytes()
            flip_a_byte(path)
            self.restores_the_one_before(saved, rf"{path.name}.*altered")
            path.write_bytes(content)
        assert_is(saved.restore(state_of(0)), 2)

    @pytest.mark.parametrize("cut", ["missing", "shorter", "no manifest"])
    def test_files_that_are(self, cut: str, saved: autopar.Checkpoints) -> None:
        manifest = saved.directory / "2" / MANIFEST
        files = [p for p in files_of(saved.directory / "2") if p != manifest]
        path = max(files, key=lambda p: p.stat().st_size)
        if cut == "missing":
            path.unlink()
        elif cut == "shorter":
            path.write_bytes(path.read_bytes()[:-1])
        else:
            manifest.unlink()
        reason = {
            "missing": "is missing",
            "shorter": "bytes, and was written with",
            "no manifest": "not written to its end",
        }
        self.restores_the_one_before(saved, reason[cut])

    @pytest.mark.parametrize(
        ("other", "reason"),
        [
            ({"v": jnp.ones(3)}, "lacks.*holds count, w besides"),
            ({"w": jnp.ones((3, 3)), "count": 0}, r"is \[3, 3\] and was saved as"),
        ],
    )
    def test_another_model(
        self, other: Tree, reason: str, saved: autopar.Checkpoints
    ) -> None:
        with pytest.raises(autopar.CheckpointError, match=f"of this model.*{reason}"):
            saved.restore(other)
        saved.save(3, other)
        saved.wait()
        with pytest.warns(UserWarning, match="step 2 was restored.*`like` must"):
            assert_is(saved.restore(state_of(0)), 2)
        assert saved.steps() == (1, 2, 3), "it may be somebody's, so it stays"

    def test_what_was_damaged_is_written_anew(self, saved: autopar.Checkpoints) -> None:
        flip_a_byte(saved.directory / "2" / MANIFEST)
        self.restores_the_one_before(saved, "altered")
        assert saved.latest() == 1
        saved.save(2, state_of(2))
        saved.wait()
        assert_is(saved.restore(state_of(0)), 2)

    def test_what_was_damaged_later_goes(self, saved: autopar.Checkpoints) -> None:
        saved.save(4, state_of(4))
        saved.wait()
        for number in (2, 4):
            flip_a_byte(saved.directory / str(number) / MANIFEST)
        self.restores_the_one_before(saved, "altered")
        saved.save(3, state_of(3))
        saved.wait()
        assert {path.name for path in saved.directory.iterdir()} == {"1", "3"}

    def test_all_of_them(self, saved: autopar.Checkpoints) -> None:
        for number in (1, 2):
            flip_a_byte(saved.directory / str(number) / MANIFEST)
        with pytest.raises(autopar.CheckpointError, match="2.*altered.*; .*1.*altered"):
            saved.restore(state_of(0))

    def test_the_one_asked_for(self, saved: autopar.Checkpoints) -> None:
        flip_a_byte(saved.directory / "2" / MANIFEST)
        with pytest.raises(autopar.CheckpointError, match="altered"):
            saved.restore(state_of(0), step=2)

    def test_one_of_a_newer_format_which_stays(
        self, saved: autopar.Checkpoints, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as newer:
            newer.setattr("autopar.runtime.checkpoints_kept._FORMAT", 2)
            saved.save(3, state_of(3))
            saved.wait()
        with pytest.warns(UserWarning, match="step 2 was restored.*format 2"):
            assert_is(saved.restore(state_of(0)), 2)
        assert saved.steps() == (1, 2, 3)

    def test_none_there(self, checkpoints: autopar.Checkpoints) -> None:
        with pytest.raises(FileNotFoundError, match="no checkpoint is in"):
            checkpoints.restore(state_of(0))

    def test_a_step_that_is_not_there(self, saved: autopar.Checkpoints) -> None:
        with pytest.raises(FileNotFoundError, match=r"step 7 is in .*of \[1, 2\]"):
            saved.restore(state_of(0), step=7)


KILLED = """
import sys, time
import autopar
from autopar.runtime import checkpoints_kept
from tests.test_checkpoints_kept import state_of

write = checkpoints_kept.write_manifest

def stop(*args):
    if sys.argv[2] == "before the rename":
        write(*args)
    print("stopped", flush=True)
    time.sleep(100)

with autopar.Checkpoints(sys.argv[1]) as checkpoints:
    checkpoints.save(1, state_of(1), data_position={"samples": 1})
    checkpoints.wait()
    checkpoints_kept.write_manifest = stop
    checkpoints.save(2, state_of(2), data_position={"samples": 2})
"""


@pytest.mark.parametrize(
    "moment",
    [slow("before the manifest"), "before the rename"],
)
def test_a_process_killed_while_writing(moment: str, tmp_path: Path) -> None:
    root = str(Path(__file__).parent.parent)
    code = f"import sys; sys.path.insert(0, {root!r})\n{KILLED}"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), moment],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "stopped\n"
    process.kill()
    assert process.wait(30) == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2
    with autopar.Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest() == 1
        TestRefused().restores_the_one_before(checkpoints, "not written to its end")
        checkpoints.save(2, state_of(2))
        checkpoints.wait()
        assert {path.name for path in tmp_path.iterdir()} == {"1", "2"}
        assert_is(checkpoints.restore(state_of(0)), 2)


class TestWritingFails:
    def test_no_room_for_the_arrays(self, saved: autopar.Checkpoints) -> None:
        """The kernel refuses the write: the limit stands for a full disk."""
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        large = {"w": np.random.default_rng(0).standard_normal(1 << 16), "count": 3}
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, before[1]))
        try:
            saved.save(3, large)
            with pytest.raises(OSError, match=r"step 3 .* was not \(that of 2 stays\)"):
                saved.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        self.previous_one_is_good_and_the_next_is_written(saved)

    @pytest.mark.parametrize("name", ["save", "restore", "wait", "close"])
    def test_the_next_call_says_so(
        self, name: str, saved: autopar.Checkpoints, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as broken:
            broken.setattr(checkpoints_kept, "write_manifest", full)
            saved.save(3, state_of(3))
            next_call: dict[str, Callable[[], Any]] = {
                "save": lambda: saved.save(4, state_of(4)),
                "restore": lambda: saved.restore(state_of(0)),
                "wait": saved.wait,
                "close": saved.close,
            }
            with pytest.raises(OSError, match="step 3 .*No space left on device"):
                next_call[name]()
        if name != "close":
            self.previous_one_is_good_and_the_next_is_written(saved)

    def previous_one_is_good_and_the_next_is_written(
        self, saved: autopar.Checkpoints
    ) -> None:
        assert {path.name for path in saved.directory.iterdir()} == {"1", "2"}
        assert_is(saved.restore(state_of(0)), 2)
        saved.save(3, state_of(3))
        saved.wait()
        assert_is(saved.restore(state_of(0)), 3)


class TestSaveRefuses:
    def test_steps_that_do_not_go_up(self, saved: autopar.Checkpoints) -> None:
        with pytest.raises(ValueError, match="go up, but 2 was to be saved after 2"):
            saved.save(2, state_of(2))
        with pytest.raises(ValueError, match="counted from 0, but got step -1"):
            saved.save(-1, state_of(2))

    def test_a_position_that_is_no_json(self, saved: autopar.Checkpoints) -> None:
        with pytest.raises(TypeError, match="kept as JSON, but .*not made of numbers"):
            saved.save(3, state_of(3), data_position=object())
        assert saved.steps() == (1, 2)

    def test_what_autopar_save_refuses(self, saved: autopar.Checkpoints) -> None:
        with pytest.raises(ValueError, match="arrays and numbers"):
            saved.save(3, {})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"directory": "run", "keep": 0}, ValueError, "1 checkpoint or more"),
        ({"directory": "run", "files": "leaf"}, ValueError, "by 'process' or by"),
        ({"directory": "gs://bucket/run"}, NotImplementedError, "is a bucket; mount"),
    ],
)
def test_other_options(options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        autopar.Checkpoints(**options)


@pytest.mark.parametrize("files", ["process", "shard"])
def test_a_checkpoint_of_commit_d944992_is_read(files: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(Path(__file__).parent / "checkpoints_of_d944992.zip") as saved:
        saved.extractall(tmp_path)
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    like = {
        "w": jax.ShapeDtypeStruct((8, 4), "f4", sharding=NamedSharding(mesh, P("x"))),
        "m": {"b": jax.ShapeDtypeStruct((4,), jnp.bfloat16), "n": 0, "lr": 0.0},
        "key": jax.random.key(0),
        "none": jnp.ones((0, 3)),
    }
    with autopar.Checkpoints(tmp_path / files) as checkpoints:
        assert checkpoints.steps() == (3,)
        found = checkpoints.restore(like)
    assert (found.step, found.data_position) == (3, {"samples": 24})
    state = found.state
    assert state["w"].sharding == like["w"].sharding
    np.testing.assert_array_equal(state["w"], np.arange(32).reshape(8, 4))
    np.testing.assert_array_equal(state["m"]["b"], np.arange(4))
    assert (state["m"]["n"], state["m"]["lr"]) == (3, 0.5)
    assert jax.random.key_data(state["key"]).tolist() == [0, 7]
    assert state["none"].shape == (0, 3)
    single = autopar.restore(tmp_path / files / "3", like)
    np.testing.assert_array_equal(single["w"], state["w"])
