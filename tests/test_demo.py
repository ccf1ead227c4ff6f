"""The demo, in small: it learns, its audit passes, and its losses are those of jit."""

from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from autopar.audit.audit import Audit
from autopar.clusters.virtual_devices import use_virtual_devices
from autopar.commands.demo import DemoResult, make_batch, read_corpus, run_demo
from autopar.commands.demo_model import Config

TINY = Config(num_layers=1, hidden=16, num_heads=2, seq_len=16, batch_size=8)


def test_the_demo_learns_and_proves_that_it_is_right(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = StringIO()
    console = Console(file=text, width=100)
    config = replace(TINY, learning_rate=0.02)
    result = run_demo(console, steps=12, num_devices=8, config=config)
    assert result.ok and result.audit.ok
    assert len(result.losses) == 12
    assert result.losses[0] == pytest.approx(np.log(256), abs=0.1)
    assert result.losses[-1] < result.losses[0] - 0.3
    assert result.largest_difference() < 1e-4
    printed = text.getvalue()
    assert "audit: ok" in printed and "equal up to rounding" in printed
    assert f"{result.losses[-1]:.6f}" in printed
    assert "plan of train_step, for one step" in capsys.readouterr().out


def test_batches_are_real_text_and_the_same_on_every_run() -> None:
    corpus = read_corpus()
    assert len(corpus) >= 1_000_000 and b"import" in corpus[:100_000].tobytes()
    batch, again = (make_batch(corpus, TINY, 3) for _ in range(2))
    np.testing.assert_array_equal(batch["bytes"], again["bytes"])
    np.testing.assert_array_equal(batch["bytes"][:, 1:], batch["labels"][:, :-1])
    assert not np.array_equal(batch["bytes"], make_batch(corpus, TINY, 4)["bytes"])


def test_a_run_that_differs_is_not_ok() -> None:
    audit = Audit((), ())
    assert DemoResult((5.0, 4.0), (5.0, 4.0001), audit).ok
    assert not DemoResult((5.0, 4.0), (5.0, 4.1), audit).ok
    assert not DemoResult((5.0, float("nan")), (5.0, 4.0), audit).ok


def test_steps_and_devices_must_be_positive() -> None:
    with pytest.raises(ValueError, match="`steps` must be 1 or more, but got 0"):
        run_demo(Console(file=StringIO()), steps=0, num_devices=8)
    with pytest.raises(ValueError, match="`devices` must be 1 or more, but got 0"):
        use_virtual_devices(0)


def test_more_virtual_devices_than_jax_started_with_are_refused() -> None:
    use_virtual_devices(8)
    with pytest.raises(RuntimeError, match="16 are needed; start a fresh process"):
        use_virtual_devices(16)
