"""Checkpoints: every form of state, saved whole and restored into any other plan."""

import sys
from pathlib import Path
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.methods.methods import PipelineParallel
from autopar.runtime.stored_arrays import StoredArray
from autopar.state.distributed_array import DistributedArray
from tests.marks import slow

Tree = Any
KEY = jax.random.key(0)
OPTIMIZER = optax.adam(1e-2, eps=1e-4)


def init(key: jax.Array) -> tuple[Tree, Tree]:
    """Three layers, so that two stages get different numbers of them."""
    params = {
        "layers": jax.random.normal(key, (3, 16, 16)) * 0.2,
        "head": jax.random.normal(key, (16, 8)) * 0.2,
    }
    return params, OPTIMIZER.init(params)


def loss_fn(params: Tree, x: jax.Array, y: jax.Array) -> jax.Array:
    def body(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ kernel), None

    x, _ = jax.lax.scan(body, x, params["layers"])
    return jnp.mean((x @ params["head"] - y) ** 2)


def train_step(params: Tree, opt_state: Tree, batch: Tree) -> Tree:
    loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
    updates, opt_state = OPTIMIZER.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


def batch_of(number: int) -> tuple[jax.Array, jax.Array]:
    x = jnp.sin(jnp.arange(32 * 16.0) + number).reshape(32, 16)
    return x, jnp.ones((32, 8))


def train(step: Any, state: Tree, numbers: range) -> tuple[Tree, list[float]]:
    losses = []
    for number in numbers:
        *state, loss = step(*state, batch_of(number))
        losses.append(float(loss))
    return tuple(state), losses


def data(leaf: Any) -> np.ndarray:
    if jax.dtypes.issubdtype(getattr(leaf, "dtype", int), jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def assert_same(actual: Tree, expected: Tree) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for ours, theirs in zip(
        jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
    ):
        assert type(ours) is type(theirs)
        assert getattr(ours, "dtype", None) == getattr(theirs, "dtype", None)
        assert getattr(ours, "weak_type", None) == getattr(theirs, "weak_type", None)
        np.testing.assert_array_equal(data(ours), data(theirs))


def mesh_of(**sizes: int) -> Mesh:
    devices = np.array(jax.devices()).reshape(tuple(sizes.values()))
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


@pytest.fixture(scope="module")
def steps() -> dict[str, Any]:
    """The train step, planned for other meshes and by other methods."""
    rows = {"mu.*layers": P(None, None, "data"), "layers": P(None, "data")}
    return {
        "data:8": autopar.parallelize(train_step, mesh="data:8"),
        "rows and columns": autopar.parallelize(train_step, mesh="data:8", pins=rows),
        "4 x 2": autopar.parallelize(train_step, mesh="data:4;model:2"),
        "one device": autopar.parallelize(
            train_step, mesh=Mesh(jax.devices()[:1], ("x",))
        ),
        "two stages": autopar.parallelize(train_step, method=PipelineParallel(2, 2)),
    }


@pytest.fixture(scope="module")
def uninterrupted() -> list[float]:
    """Losses of four steps on one device."""
    return train(jax.jit(train_step), jax.jit(init)(KEY), range(4))[1]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        slow("data:8", "4 x 2"),
        slow("data:8", "one device"),
        ("rows and columns", "two stages"),
        ("two stages", "4 x 2"),
        slow("two stages", "two stages"),
    ],
)
def test_training_goes_on_under_another_plan(
    before: str,
    after: str,
    steps: dict[str, Any],
    uninterrupted: list[float],
    tmp_path: Path,
) -> None:
    step = steps[before]
    state = step.init(init, KEY, batch=(batch_of(0),))
    state, losses = train(step, state, range(2))
    autopar.save(tmp_path / "state", state)
    step = steps[after]
    like = step.abstract_state(init, KEY, batch=(batch_of(0),))
    restored = autopar.restore(tmp_path / "state", like)
    for leaf, kind in zip(
        jax.tree.leaves(restored), jax.tree.leaves(like), strict=True
    ):
        assert leaf.sharding == kind.sharding
        np.testing.assert_array_equal(leaf, at(state, restored, leaf))
    losses += train(step, restored, range(2, 4))[1]
    np.testing.assert_allclose(losses, uninterrupted, rtol=1e-5)


def at(tree: Tree, other: Tree, leaf: Any) -> Any:
    """The leaf of `tree` where `leaf` is in `other`."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    return next(ours for ours, theirs in pairs if theirs is leaf)


def test_orbax_itself_takes_the_state(steps: dict[str, Any], tmp_path: Path) -> None:
    """As long as all leaves are `jax.Array`s, nothing of ours is needed."""
    step = steps["4 x 2"]
    state = step.init(init, KEY, batch=(batch_of(0),))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        found = checkpointer.restore(
            tmp_path / "state", step.abstract_state(init, KEY, batch=(batch_of(0),))
        )
    assert_same(found, state)
    train(step, found, range(1))


def test_what_orbax_wrote_is_read_and_the_other_way_round(tmp_path: Path) -> None:
    state = jax.jit(init)(KEY)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "theirs", state)
        checkpointer.wait_until_finished()
        assert_same(autopar.restore(tmp_path / "theirs", state), state)
        autopar.save(tmp_path / "ours", state)
        found = checkpointer.restore(tmp_path / "ours")
    assert found["0"].keys() == {"layers", "head"}
    np.testing.assert_array_equal(found["1"]["0"]["mu"]["head"], np.zeros((16, 8)))


def in_chunks(array: Any, *rows: int) -> DistributedArray:
    parts = np.split(np.asarray(array), rows)
    pairs = zip(parts, jax.devices(), strict=False)
    return DistributedArray([jax.device_put(part, device) for part, device in pairs])


FORMS = {
    "one array": jnp.arange(3.0),
    "in shards": jax.device_put(
        jnp.arange(64.0).reshape(16, 4), NamedSharding(mesh_of(a=4, b=2), P("b", "a"))
    ),
    "in chunks": {"w": in_chunks(jnp.arange(12.0).reshape(6, 2), 1, 3)},
    "in one chunk": in_chunks(jnp.arange(3.0)),
    "a scalar in one chunk": DistributedArray([jnp.float32(3)]),
    "numpy": {"array": np.arange(3), "scalar": np.float32(2)},
    "numbers": [True, 3, 2.5],
    "weakly typed": jax.jit(lambda: (3, 2.5))(),
    "keys": {
        "key": KEY,
        "rbg": jax.random.split(jax.random.key(1, impl="rbg"), 3),
        "raw": jax.random.PRNGKey(1),
    },
    "small dtypes": [jnp.ones(4, t) for t in ("bfloat16", "float8_e4m3fn", "int4")],
    "others": [jnp.array([True, False]), jnp.ones(2, "complex64")],
    "empty": {"nothing": jnp.zeros((0, 4)), "something": jnp.ones(1)},
    "no arrays": {"none": None, "function": jnp.tanh, "name": "adam", "w": jnp.ones(1)},
    "optax": optax.chain(optax.clip(1.0), optax.adamw(1e-3)).init({"w": jnp.ones(3)}),
    "names with slashes": {"mlp/~/linear_0": {"w": jnp.ones(3)}},
    "numbers as keys": {3: jnp.ones(3), 10: jnp.zeros(2)},
    "nnx state": nnx.state(nnx.Linear(4, 4, rngs=nnx.Rngs(0))),
}


@pytest.mark.parametrize("state", FORMS.values(), ids=FORMS.keys())
def test_every_form_of_state_comes_back(state: Tree, tmp_path: Path) -> None:
    autopar.save(tmp_path / "state", state)
    found = autopar.restore(tmp_path / "state", state)
    assert_same(found, state)
    for ours, theirs in zip(
        jax.tree.leaves(found), jax.tree.leaves(state), strict=True
    ):
        assert getattr(ours, "sharding", None) == getattr(theirs, "sharding", None)


def test_a_shape_stands_for_an_array_of_numpy(tmp_path: Path) -> None:
    autopar.save(tmp_path / "state", in_chunks(jnp.arange(6.0), 1))
    kind = jax.ShapeDtypeStruct((6,), jnp.float32)
    assert_same(autopar.restore(tmp_path / "state", kind), np.arange(6.0, dtype="f4"))


def test_chunks_may_be_cut_otherwise(tmp_path: Path) -> None:
    autopar.save(tmp_path / "state", in_chunks(jnp.arange(6.0), 1))
    like = in_chunks(jnp.zeros(6), 2, 5)
    found = autopar.restore(tmp_path / "state", like)
    assert_same(list(found.chunks), list(in_chunks(jnp.arange(6.0), 2, 5).chunks))


def test_each_piece_is_read_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = jnp.arange(24.0).reshape(6, 4)
    autopar.save(tmp_path / "state", {"w": in_chunks(whole, 2, 5)})
    sizes, read = list[int](), StoredArray.read

    def counted(self: StoredArray, index: Any) -> np.ndarray:
        sizes.append((found := read(self, index)).nbytes)
        return found

    monkeypatch.setattr(StoredArray, "read", counted)
    halves = NamedSharding(mesh_of(a=2, b=4), P(None, "a"))
    copies = NamedSharding(mesh_of(a=8), P())
    like = [jax.device_put(jnp.zeros((n, 4)), s) for n, s in ((4, halves), (2, copies))]
    found = autopar.restore(tmp_path / "state", {"w": DistributedArray(like)})["w"]
    assert [chunk.sharding for chunk in found.chunks] == [halves, copies]
    np.testing.assert_array_equal(found, whole)
    assert sizes == [32, 32, 32], "each shard once, and never the whole"


def test_modules_come_back_with_their_functions(tmp_path: Path) -> None:
    class Model(nnx.Module):
        def __init__(self, seed: int) -> None:
            self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(seed))
            self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(seed))
            self.again = self.linear.kernel  # one variable in two places

    def make(seed: int) -> tuple[Any, ...]:
        model = Model(seed)
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        mlp = equinox.nn.MLP(4, 4, 8, 1, key=jax.random.key(seed))
        return model, optimizer, mlp

    saved = make(0)
    autopar.save(tmp_path / "nnx", saved[:2])
    model, optimizer = autopar.restore(tmp_path / "nnx", make(1)[:2])
    assert_same(nnx.state((model, optimizer)), nnx.state(saved[:2]))
    assert model.again is model.linear.kernel
    autopar.save(tmp_path / "equinox", saved[2])
    mlp = autopar.restore(tmp_path / "equinox", make(1)[2])
    assert equinox.tree_equal(mlp, saved[2])


class TestSaveRefuses:
    def test_a_directory_that_exists(self, tmp_path: Path) -> None:
        with pytest.raises(FileExistsError, match="name it by the step"):
            autopar.save(tmp_path, {"w": jnp.ones(3)})

    @pytest.mark.parametrize(
        ("state", "error", "message"),
        [
            ({"none": None}, ValueError, "arrays and numbers, but a dict without any"),
            (
                {"w": jax.ShapeDtypeStruct((), "f4")},
                TypeError,
                r"\['w'\] is ShapeDtype",
            ),
            ({"a.b": 1, "a": {"b": 2}}, ValueError, "are both called 'a.b'"),
        ],
        ids=["nothing", "shapes", "names"],
    )
    def test_other_trees(
        self, state: Tree, error: Any, message: str, tmp_path: Path
    ) -> None:
        with pytest.raises(error, match=message):
            autopar.save(tmp_path / "state", state)
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("form", ["one array", "in chunks"])
    def test_what_was_donated(self, form: str, tmp_path: Path) -> None:
        state = jax.tree.map(
            jnp.copy if form == "one array" else lambda x: x, FORMS[form]
        )
        if form == "in chunks":
            state = {"w": in_chunks(state["w"], 2)}
        for leaf in jax.tree.leaves(state):
            leaf.delete()
        with pytest.raises(RuntimeError, match="until it is donated or deleted"):
            autopar.save(tmp_path / "state", state)

    def test_a_missing_orbax(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
        for call in (autopar.save, autopar.restore):
            with pytest.raises(ImportError, match=r"install 'autopar\[checkpoint\]'"):
                call(tmp_path / "state", {"w": jnp.ones(3)})


class TestRestoreRefuses:
    @pytest.fixture
    def saved(self, tmp_path: Path) -> Path:
        state = {"w": jnp.ones((16, 4)), "key": KEY, "opt": {"count": 3}}
        autopar.save(tmp_path / "state", state)
        return tmp_path / "state"

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"v": jnp.ones(3)}, r"lacks \['v'\]; give a tree"),
            ({"opt": {}}, r"holds opt.count besides"),
            ({"w": jnp.ones((16, 5))}, r"\['w'\] is \[16, 5\] and was .* \[16, 4\]"),
            ({"w": jnp.ones((16, 4), "int32")}, r"\['w'\] is int32 .* as float32"),
            ({"w": np.ones((16, 4), "f8")}, r"is float64 and was saved as float32"),
            ({"opt": {"count": 3.0}}, r"is float64 and was saved as int64"),
            ({"key": jax.random.key(1, impl="rbg")}, r"\['key'\] is \[4\] and was"),
        ],
    )
    def test_another_tree(self, changes: Tree, message: str, saved: Path) -> None:
        like = {"w": jnp.ones((16, 4)), "key": KEY, "opt": {"count": 0}, **changes}
        with pytest.raises(ValueError, match=message):
            autopar.restore(saved, like)

    def test_keys_of_another_kind(self, tmp_path: Path) -> None:
        autopar.save(tmp_path / "state", jax.random.key(1, impl="rbg"))
        with pytest.raises(ValueError, match="the keys that were saved"):
            autopar.restore(tmp_path / "state", jax.random.key(1, impl="unsafe_rbg"))

    def test_a_directory_that_is_missing(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="is not there"):
            autopar.restore(tmp_path / "state", jnp.ones(3))

    @pytest.mark.parametrize("kind", ["a file", "nothing in it", "another format"])
    def test_another_thing(self, kind: str, tmp_path: Path) -> None:
        path = tmp_path / "state"
        if kind == "a file":
            path.write_text("{}")
        else:
            path.mkdir()
        if kind == "another format":
            (path / "_METADATA").write_text("{}")
        with pytest.raises(ValueError, match="autopar.save or Orbax wrote to its end"):
            autopar.restore(path, jnp.ones(3))

    def test_a_save_that_was_cut_off(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        def full(*_: Any) -> None:
            raise OSError("No space left on device")

        with monkeypatch.context() as broken:
            broken.setattr(ocp.StandardCheckpointHandler, "finalize", full)
            with pytest.raises(OSError, match="No space left"):
                autopar.save(tmp_path / "state", jnp.ones(3))
        (left,) = tmp_path.iterdir()
        with pytest.raises(ValueError, match="cut off has .orbax-checkpoint-tmp in"):
            autopar.restore(left, jnp.ones(3))
        with pytest.raises(FileNotFoundError):
            autopar.restore(tmp_path / "state", jnp.ones(3))
        autopar.save(tmp_path / "state", jnp.ones(3))
        assert_same(autopar.restore(tmp_path / "state", jnp.zeros(3)), jnp.ones(3))
