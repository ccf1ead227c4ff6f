"""GPT-3 175B on 1,024 devices: what is planned, to the byte, beside closed forms."""

import pytest

from benchmarks.gpt3_plan import measure


@pytest.mark.slow
def test_gpt3_175b_is_planned_on_1024_devices_of_80_gb() -> None:
    """ZeRO-3's state and traffic (2.1 of the acceptance rows), activations (2.6)."""
    found = measure()
    # What 1,024 does not divide, the step counter, lies whole on every device.
    assert found.state_bytes == pytest.approx(found.state_form, abs=64)
    assert found.kept_bytes == found.kept_form
    assert found.reduced_bytes == pytest.approx(found.reduced_form, rel=1e-6)
    # The words of the embedding are not read, so not gathered, in the backward pass.
    assert found.gathered_bytes == pytest.approx(found.gathered_form, rel=0.003)
    assert found.gathered_bytes <= found.gathered_form
    assert found.state_bytes < found.peak_bytes < found.device_bytes
