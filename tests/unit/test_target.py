"""Targets and toolchains: names, probing with a scripted NVML, versions against their sources."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tuner import target as module
from tuner.errors import TargetError
from tuner.target import Target, Toolchain, named, probe, toolchain

_H200 = (9, 0, 16896, "NVIDIA H200", 700_000)


def fake_nvml(monkeypatch: pytest.MonkeyPatch, *boards: tuple[int, int, int, str, int | None]) -> None:
    """Stand in for NVML with boards of (major, minor, CUDA cores, name, power limit in mW)."""
    nvml = types.ModuleType("pynvml")

    class NVMLError(Exception):
        pass

    def power(i: int) -> int:
        limit = boards[i][4]
        if limit is None:
            raise NVMLError("not supported")
        return limit

    functions: dict[str, Any] = {
        "NVMLError": NVMLError,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: len(boards),
        "nvmlDeviceGetHandleByIndex": lambda i: i,
        "nvmlDeviceGetCudaComputeCapability": lambda i: boards[i][:2],
        "nvmlDeviceGetNumGpuCores": lambda i: boards[i][2],
        "nvmlDeviceGetName": lambda i: boards[i][3],
        "nvmlDeviceGetEnforcedPowerLimit": power,
        "nvmlDeviceGetUUID": lambda i: f"GPU-{i}",
    }
    vars(nvml).update(functions)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)


# name, compute capability, CUDA cores and SMs as in NVIDIA's architecture white papers and data sheets
@pytest.mark.parametrize(
    ("board", "arch", "num_sms"),
    [
        (_H200, "sm_90a", 132),
        ((9, 0, 14592, "NVIDIA H100 PCIe", 350_000), "sm_90a", 114),
        ((10, 0, 18944, "NVIDIA B200", 1_000_000), "sm_100a", 148),
        ((8, 9, 7424, "NVIDIA L4", 72_000), "sm_89", 58),
        ((8, 6, 10752, "NVIDIA RTX A6000", 300_000), "sm_86", 84),
        ((8, 0, 6912, "NVIDIA A100-SXM4-80GB", 400_000), "sm_80", 108),
        ((7, 5, 2560, "Tesla T4", 70_000), "sm_75", 40),
        ((7, 0, 5120, "Tesla V100-SXM2-16GB", 300_000), "sm_70", 80),
    ],
)
def test_probe_reads_a_gpu(
    monkeypatch: pytest.MonkeyPatch, board: tuple[int, int, int, str, int], arch: str, num_sms: int
) -> None:
    fake_nvml(monkeypatch, board)
    found = probe()
    assert (found.model, found.arch, found.num_sms) == (board[3], arch, num_sms)
    assert found.power_cap_w == board[4] / 1000
    assert found.is_gpu


def test_probe_takes_the_gpu_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch, _H200, (8, 9, 7424, "NVIDIA L4", None))
    assert probe("cuda").uuid == probe("cuda:0").uuid == "GPU-0"
    second = probe("cuda:1")
    assert (second.model, second.device_index, second.power_cap_w) == ("NVIDIA L4", 1, None)
    with pytest.raises(TargetError, match=r"'cuda:2' does not exist: this machine has 2 GPU\(s\)"):
        probe("cuda:2")


def test_probe_takes_the_gpu_whose_uuid_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch, _H200, *[(8, 9, 7424, "NVIDIA L4", None)] * 11)
    assert (probe("GPU-0").device_index, probe("GPU-0").model) == (0, "NVIDIA H200")
    assert probe("GPU-10").device_index == 10
    assert probe("GPU-10", visible="10,0").device_index == 10
    with pytest.raises(TargetError, match="'GPU-1' names several GPUs here: GPU-0, GPU-1,"):
        probe("GPU-1")
    with pytest.raises(TargetError, match="'GPU-2' is none of the GPUs that are visible here: GPU-0; see nvidia-smi"):
        probe("GPU-2", visible="0")
    with pytest.raises(TargetError, match=r"'GPU-' (names several|is none)"):
        probe("GPU-")
    fake_nvml(monkeypatch)
    with pytest.raises(TargetError, match="'GPU-0' is none of the GPUs that are visible here: there are none"):
        probe("GPU-0")


def test_probe_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch)
    found = probe("auto")
    assert (found.arch, found.device, found.is_gpu) == ("cpu", "cpu", False)
    assert found.num_sms == len(os.sched_getaffinity(0))
    with pytest.raises(TargetError, match="'cuda:0' does not exist: this machine has no NVIDIA GPU"):
        probe("cuda:0")


def test_probe_without_the_nvml_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # import raises ImportError
    assert probe("auto").arch == "cpu"


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:-1", "cuda:x", "CUDA", ""])
def test_an_unknown_device_is_named(device: str) -> None:
    with pytest.raises(TargetError) as error:
        probe(device)
    assert repr(device) in str(error.value)
    assert "auto, cpu, cuda or cuda:N" in str(error.value)


@pytest.mark.parametrize(
    ("name", "arch", "num_sms"),
    [
        ("sm_90a", "sm_90a", 132),
        ("sm90", "sm_90a", 132),
        ("sm_100", "sm_100a", 148),
        ("sm103", "sm_103a", 148),
        ("fake", "fake", 1),
    ],
)
def test_named(name: str, arch: str, num_sms: int) -> None:
    assert (named(name).arch, named(name).num_sms) == (arch, num_sms)


def test_an_unknown_target_is_named_with_what_is_known() -> None:
    with pytest.raises(TargetError, match=r"'sm_42'; known: cpu, fake, sm_100a, sm_103a, sm_90a"):
        named("sm_42")


def test_target_key_leaves_out_what_names_one_board_and_nothing_else() -> None:
    base = Target("NVIDIA H200", "sm_90a", 132, 700, uuid="GPU-a", device_index=0)
    assert base.key == "t1|sm_90a|NVIDIA H200|132|700w"
    assert replace(base, uuid="GPU-b", device_index=3).key == base.key
    others: list[dict[str, Any]] = [
        {"model": "NVIDIA H100"}, {"arch": "sm_100a"}, {"num_sms": 1}, {"power_cap_w": 600}, {"power_cap_w": None},
    ]  # fmt: skip
    assert len({base.key, *(replace(base, **o).key for o in others)}) == 6


def test_toolchain_key_has_every_version() -> None:
    base = Toolchain("580.1", "13.0", "2.11.0", "3.6.0", "4.8.1", "4.0.0b36:0123456789ab", "3.12")
    assert base.key == (
        "c1|driver=580.1|cuda=13.0|torch=2.11.0|triton=3.6.0|cutlass_dsl=4.8.1"
        "|flash_attn_4=4.0.0b36:0123456789ab|python=3.12"
    )
    assert Toolchain(torch="2.11.0").key.startswith("c1|driver=-|cuda=-|torch=2.11.0|triton=-")


def installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def test_toolchain_agrees_with_the_installed_packages() -> None:
    found = toolchain()
    assert found.torch == installed("torch")
    assert found.triton == installed("triton")
    assert found.cutlass_dsl == installed("nvidia-cutlass-dsl")
    assert found.python == ".".join(map(str, sys.version_info[:2]))


def test_toolchain_cuda_is_what_torch_says() -> None:
    torch = pytest.importorskip("torch")
    assert toolchain().cuda == (torch.version.cuda or "")


def test_toolchain_driver_agrees_with_the_kernel_module() -> None:
    proc = Path("/proc/driver/nvidia/version")
    if not Path("/dev/nvidiactl").exists():
        assert toolchain().driver == ""
    elif proc.exists():
        assert toolchain().driver in proc.read_text()
        assert toolchain().driver
    else:
        pytest.skip("a GPU is here, but the kernel module's version cannot be read")


def test_fa4_fingerprint_is_a_fresh_hash_of_its_sources() -> None:
    if not installed("flash-attn-4"):
        assert toolchain().flash_attn_4 == ""
        return
    root = str(importlib.metadata.distribution("flash-attn-4").locate_file("flash_attn/cute"))
    sources = [
        (tuple(os.path.relpath(os.path.join(folder, f), root).split(os.sep)), os.path.join(folder, f))
        for folder, _, files in os.walk(root)
        for f in files
        if f.endswith(".py")
    ]
    assert len(sources) > 10  # the package's own, not an empty folder
    blob = b"".join("/".join(name).encode() + b"\0" + Path(path).read_bytes() for name, path in sorted(sources))
    digest = hashlib.sha256(blob).hexdigest()[:12]
    assert toolchain().flash_attn_4 == f"{installed('flash-attn-4')}:{digest}"


def test_fa4_fingerprint_changes_with_one_byte(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "flash_attn" / "cute"
    package.mkdir(parents=True)
    (package / "a.py").write_text("x = 1\n")

    class Distribution:
        def locate_file(self, path: str) -> Path:
            return tmp_path / path

    monkeypatch.setattr(importlib.metadata, "version", lambda _: "4.0.0b1")
    monkeypatch.setattr(importlib.metadata, "distribution", lambda _: Distribution())
    read = module._fa4_fingerprint.__wrapped__
    before = read()
    (package / "a.py").write_text("x = 2\n")
    edited = read()
    (package / "a.py").rename(package / "b.py")
    assert len({before, edited, read()}) == 3
    assert before.startswith("4.0.0b1:")


def test_cuda_visible_devices_hides_and_renumbers() -> None:
    gpus = [
        Target("NVIDIA H200", "sm_90a", 132, device_index=i, uuid=f"GPU-{letter * 8}")
        for i, letter in enumerate("abcd")
    ]

    def shown(visible: str | None) -> list[int]:
        return [g.device_index for g in module._visible(gpus, visible)]

    assert shown(None) == [0, 1, 2, 3]
    assert shown("") == []
    assert shown("2,0") == [2, 0]
    assert shown("GPU-bbbb, 3") == [1, 3]
    assert shown("1,9,2") == [1]  # as in CUDA: what follows a bad one is not seen
    assert shown("GPU-") == []  # a prefix that fits several names none
