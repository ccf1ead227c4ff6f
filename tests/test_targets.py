"""What can be compiled for, and where its compilers are; nothing is compiled here.

`tests/targets` compiles.
"""

import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.cli import main
from autopar.errors import InfeasiblePlanError, TargetError
from autopar.targets import compile_service, compilers
from autopar.targets.target import Target, gpu_proto, known_kinds

X = jax.ShapeDtypeStruct((16, 8), jnp.float32)


def double(x: jax.Array) -> jax.Array:
    return 2 * x


def target(preset: str, num_devices: int | None = None) -> Target:
    return Target.of(autopar.Cluster.preset(preset), num_devices)


def plan_compiled(step: Any, preset: str, *args: Any) -> autopar.Plan:
    cluster = autopar.Cluster.preset(preset)
    return autopar.parallelize(step, cluster=cluster).plan(*args, compile=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the compilers, which has none."""
    monkeypatch.setenv(compilers.VARIABLE, str(tmp_path / "targets"))
    return tmp_path / "targets"


@pytest.fixture
def installed(folder: Path) -> Path:
    """Where the compilers of this jax are looked for; they are there, and empty."""
    found = compilers.folder_of("cuda")
    assert found is not None
    found.mkdir(parents=True)
    return found


@pytest.mark.parametrize(
    ("preset", "num_devices", "name", "topology"),
    [
        ("1x8xH100", None, "1x8xH100", "1x1x8"),
        ("2x8xH100", None, "2x8xH100", "1x2x8"),
        ("2x8xH100", 4, "1x4xH100", "1x1x4"),
        ("4x8xA100-80GB", 16, "2x8xA100-80GB", "1x2x8"),
    ],
)
def test_a_cluster_or_a_submesh_of_it_is_a_topology(
    preset: str, num_devices: int | None, name: str, topology: str
) -> None:
    found = target(preset, num_devices)
    assert str(found) == name
    assert dict(found.topology)["topology"] == topology


@pytest.mark.parametrize("kind", known_kinds("cuda"))
def test_each_kind_has_a_preset_and_about_its_memory(kind: str) -> None:
    cluster = autopar.Cluster.preset(f"1x8x{kind}")
    found = Target.of(cluster)
    assert found.memory_bytes == pytest.approx(cluster.device.memory_bytes, rel=0.1)
    description = dict(found.topology)["target_config"]
    assert f"device_memory_size: {found.memory_bytes}\n" in description


@pytest.mark.parametrize(
    ("preset", "num_devices", "said"),
    [
        ("1x8xCPU", None, "can be compiled for are V100, A100, .* has 'CPU'"),
        ("3xv5e", None, "3xv5e has 3 devices, which no slice has; name .* 'v5e:2x4'"),
        ("4*v5e:2x4", 12, "12 devices of 4\\*v5e:2x4 with 8 a slice are .* use 8"),
        ("2x8xH100", 12, "12 devices of 2x8xH100 with 8 a host are neither; use 8"),
        ("2x8xH100", 32, "32 devices of 2x8xH100"),
        ("1x8xH100+1x8xA100", None, "of one kind, .* has several; use Pipeline"),
    ],
)
def test_what_no_compiler_knows_is_named_with_what_it_does(
    preset: str, num_devices: int | None, said: str
) -> None:
    with pytest.raises(TargetError, match=said):
        target(preset, num_devices)


def test_gpus_are_told_by_the_same_fields() -> None:
    fields = [
        [line.partition(":")[0] for line in gpu_proto(kind).splitlines()]
        for kind in known_kinds("cuda")
    ]
    assert len(fields) > 4 and all(each == fields[0] for each in fields)


def test_without_compilers_a_step_is_planned_and_says_how_to_get_them(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = autopar.Cluster.preset("1x8xH100")
    autopar.parallelize(double, cluster=cluster).plan(X).explain()
    said = capsys.readouterr().out
    assert "modelled, not compiled" in said
    assert "autopar targets add cuda" in " ".join(said.split())
    with pytest.raises(TargetError, match="has none; run: autopar targets add cuda"):
        plan_compiled(double, "1x8xH100", X)


def test_compilers_of_another_jax_are_none(folder: Path) -> None:
    (folder / "cuda-jax0.4.1-py3.11").mkdir(parents=True)
    with pytest.raises(TargetError, match="has those of cuda-jax0.4.1-py3.11; run"):
        plan_compiled(double, "1x8xH100", X)


def test_a_device_whose_compiler_is_not_installed_is_not_compiled_for(
    installed: Path,
) -> None:
    with pytest.raises(TargetError, match="has none; run: autopar targets add tpu"):
        plan_compiled(double, "1x8xv5e", X)


def test_a_step_that_calls_the_host_is_not_compiled_for_others(installed: Path) -> None:
    def step(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda _: None, x.sum())
        return 2 * x

    with pytest.raises(TargetError, match="no host callbacks, but step calls the host"):
        plan_compiled(step, "1x8xH100", X)


def test_compilers_that_do_not_load_are_an_error_that_names_the_program(
    installed: Path,
) -> None:
    with pytest.raises(TargetError, match="double must compile for 1x8xH100, but its"):
        plan_compiled(double, "1x8xH100", X)


def test_a_program_that_its_compiler_finds_too_large_is_infeasible(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*_: Any) -> dict[str, str]:
        return {"error": "JaxRuntimeError: RESOURCE_EXHAUSTED: 56.16G of 15.75G."}

    monkeypatch.setattr(compile_service._Child, "ask", ask)
    said = "fit the .* of one device of 1x8xH100, .* 56.16G of 15.75G. Give a lower"
    with pytest.raises(InfeasiblePlanError, match=said):
        plan_compiled(double, "1x8xH100", X)


def test_jax_itself_says_which_plugins_it_takes() -> None:
    plugin, runtime, assembler = compilers.requirements("cuda")
    version = metadata.version("jax")
    assert plugin.startswith("jax-cuda12-plugin") and version in plugin
    assert runtime == plugin.replace("plugin", "pjrt")
    assert assembler == "nvidia-cuda-nvcc-cu12"
    assert "nvidia-cudnn-cu12" in compilers.requirements("cuda", cudnn=True)


def test_jax_itself_says_which_libtpu_it_takes() -> None:
    (wanted,) = compilers.requirements("tpu")
    assert f'{wanted}; extra == "tpu"' in (metadata.requires("jax") or [])


def test_a_jax_without_such_plugins_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda _: ["numpy"])
    with pytest.raises(NotImplementedError, match="'cuda12-local', which jax"):
        compilers.requirements("cuda")


def fake_pip(
    monkeypatch: pytest.MonkeyPatch, code: int, message: str = ""
) -> list[list[str]]:
    """Installs one file, or fails; returns its commands."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        made = Path(command[command.index("--target") + 1])
        (made / "plugin.py").write_text("")
        return subprocess.CompletedProcess(command, code, "", message)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_compilers_are_added_listed_and_removed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    commands = fake_pip(monkeypatch, 0)
    assert _run("targets") == 0
    listed = capsys.readouterr().out
    for platform in compilers.PLATFORMS:
        assert f"not installed; run: autopar targets add {platform}" in listed
    assert _run("targets", "add", "cuda") == 0
    found = compilers.folder_of("cuda")
    assert found is not None and (found / "plugin.py").exists()
    assert list(folder.iterdir()) == [found]
    assert commands[0][-3:] == list(compilers.requirements("cuda"))
    assert "--no-deps" in commands[0]  # this environment has jax
    capsys.readouterr()
    assert _run("targets") == 0
    assert "add cuda" not in capsys.readouterr().out
    assert _run("targets", "remove", "cuda") == 0
    assert not list(folder.iterdir())
    assert compilers.find("cuda") is None


def test_what_pip_cannot_install_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pip(monkeypatch, 1, "no space\n")
    with pytest.raises(TargetError, match="but it failed: no space. With another"):
        compilers.add("cuda")
    assert not list(folder.iterdir())


@pytest.mark.parametrize("change", [compilers.add, compilers.remove])
def test_an_unknown_platform_is_refused(folder: Path, change: Any) -> None:
    with pytest.raises(TargetError, match="added for cuda, tpu, but got 'rocm'"):
        change("rocm")


def test_compilers_that_are_switched_off_are_not_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(compilers.VARIABLE, "off")
    assert compilers.find("cuda") is None
    with pytest.raises(TargetError, match="but it is 'off'; unset it, or give --path"):
        compilers.add("cuda")


def _run(*args: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(args)
    return int(caught.value.code or 0)
