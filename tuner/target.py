"""Where a kernel runs: the Target and its Toolchain, probed here and nowhere else.

The probe imports neither torch nor cutlass: GPU figures come from NVML, versions from package
metadata, and the FA4 fingerprint from hashing its sources on disk.

    >>> named("sm_90a").num_sms
    132
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tuner.errors import TargetError

BLACKWELL = ("sm_100a", "sm_103a")  # data-center Blackwell: B200 and B300
FA4_ARCHES = ("sm_90a", *BLACKWELL)  # what FA4's families here are for


@dataclass(frozen=True)
class Target:
    """A GPU or CPU model as far as it decides which kernel is fastest.

    ``arch`` is ``sm_90a``, ``sm_100a``, ``sm_103a``, ``sm_80`` ..., ``cpu`` or ``fake``. ``num_sms`` counts
    streaming multiprocessors (cores on a CPU). ``power_cap_w`` is None where nobody says.
    """

    model: str
    arch: str
    num_sms: int
    power_cap_w: int | None = None
    device: str = "cuda"  # torch's device type
    device_index: int = 0
    uuid: str = ""

    @property
    def is_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def overlaps(self) -> bool:
        """Tell whether compiling may go on while this device is measured: not on the CPU that compiles."""
        return self.device != "cpu"

    @property
    def key(self) -> str:
        """Canonical text without what names a single board (uuid, index)."""
        cap = "-" if self.power_cap_w is None else f"{self.power_cap_w}w"
        return f"t1|{self.arch}|{self.model}|{self.num_sms}|{cap}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Toolchain:
    """Versions that decide what a kernel compiles to and how it runs; empty if not installed."""

    driver: str = ""
    cuda: str = ""
    torch: str = ""
    triton: str = ""
    cutlass_dsl: str = ""
    flash_attn_4: str = ""  # version and, after a colon, the first 12 digits of the sources' SHA-256
    python: str = ""

    @property
    def key(self) -> str:
        return "c1|" + "|".join(f"{k}={v or '-'}" for k, v in asdict(self).items())

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


# Targets that can be compiled for without being at hand. SM counts: NVIDIA's data sheets for the
# SXM parts (H100/H200: 132; B200: 148); a B300's is taken to be a B200's, since none was seen yet.
_NAMED = {
    "sm_90a": Target("NVIDIA H200", "sm_90a", 132),
    "sm_100a": Target("NVIDIA B200", "sm_100a", 148),
    "sm_103a": Target("NVIDIA B300", "sm_103a", 148),
    "cpu": Target("cpu", "cpu", os.cpu_count() or 1, device="cpu"),
    "fake": Target("fake", "fake", 1, device="fake"),
}


def named(arch: str) -> Target:
    """Return the target for an architecture's name, to compile for or to look configs up.

    Raises:
        TargetError: if there is no such target.
    """
    if found := re.fullmatch(r"sm_?(90|100|103)", arch):
        arch = f"sm_{found[1]}a"
    if arch not in _NAMED:
        raise TargetError(f"unknown target {arch!r}; known: {', '.join(sorted(_NAMED))}, or a device as cuda:0")
    return _NAMED[arch]


def probe(device: str = "auto", visible: str | None = None) -> Target:
    """Find the target on this machine: ``auto``, ``cpu``, ``fake``, ``cuda``, ``cuda:1`` or ``GPU-1f2e...``.

    ``auto`` takes the first GPU, or the CPU where there is none. ``visible`` is the value of
    CUDA_VISIBLE_DEVICES, which hides and renumbers GPUs; None shows all, in the bus order of NVML. A UUID,
    or the beginning of one, as nvidia-smi -L has it, names a board whatever its number.

    Raises:
        TargetError: if the device does not exist here.
    """
    if device == "fake":
        return _NAMED["fake"]
    if device == "cpu":
        return _cpu()
    if device.startswith("GPU-"):
        return _by_uuid(device, visible)
    m = re.fullmatch(r"cuda(?::(\d+))?", device)
    if device != "auto" and not m:
        raise TargetError(f"unknown device {device!r}; use auto, cpu, cuda or cuda:N, or a GPU's UUID")
    index = int(m[1]) if m and m[1] else 0
    gpus = _visible(_gpus(), visible)
    if not gpus and device == "auto":
        return _cpu()
    if index >= len(gpus):
        here = f"{len(gpus)} GPU(s)" if gpus else "no NVIDIA GPU"
        raise TargetError(
            f"device {device!r} does not exist: this machine has {here}; use cpu, or see `flashtune doctor`"
        )
    return gpus[index]


def toolchain() -> Toolchain:
    """Read the versions of everything that shapes a kernel on this machine."""
    return Toolchain(
        driver=_driver(),
        cuda=_torch_cuda(),
        torch=version_of("torch"),
        triton=version_of("triton"),
        cutlass_dsl=version_of("nvidia-cutlass-dsl"),
        flash_attn_4=_fa4_fingerprint(),
        python=f"{platform.python_version_tuple()[0]}.{platform.python_version_tuple()[1]}",
    )


def version_of(package: str) -> str:
    """Return an installed package's version, or the empty string."""
    import importlib.metadata as metadata  # not at the top: it takes 23 to 31 ms, and few need it

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _torch_cuda() -> str:
    """Return the CUDA version torch was built for, read from its version file without importing it."""
    import importlib.metadata as metadata

    try:
        text = Path(str(metadata.distribution("torch").locate_file("torch/version.py"))).read_text()
    except (metadata.PackageNotFoundError, OSError):
        return ""
    m = re.search(r"^cuda\b[^=]*= '([\d.]+)'", text, flags=re.MULTILINE)
    return m[1] if m else ""


@lru_cache(maxsize=1)
def _fa4_fingerprint() -> str:
    """Return FA4's version and a digest of its sources: pre-releases change without a new number."""
    import importlib.metadata as metadata

    version = version_of("flash-attn-4")
    if not version:
        return ""
    root = Path(str(metadata.distribution("flash-attn-4").locate_file("flash_attn/cute")))
    if not root.is_dir():  # an editable install: its sources lie elsewhere
        spec = importlib.util.find_spec("flash_attn")
        places = [Path(p) / "cute" for p in (spec.submodule_search_locations or [])] if spec else []
        root = next((p for p in places if p.is_dir()), root)
    h = hashlib.sha256()
    for src in sorted(root.rglob("*.py")):
        h.update(src.relative_to(root).as_posix().encode() + b"\0" + src.read_bytes())
    return f"{version}:{h.hexdigest()[:12]}"


def _cpu() -> Target:
    model = platform.processor() or platform.machine()
    try:
        m = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), flags=re.MULTILINE)
        model = m[1].strip() if m else model
    except OSError:
        pass
    return Target(model, "cpu", len(os.sched_getaffinity(0)), device="cpu")


def _visible(gpus: list[Target], visible: str | None) -> list[Target]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names by index or UUID; as in CUDA, the first bad one ends the list."""
    if visible is None:
        return gpus
    shown = []
    for name in (n.strip() for n in visible.split(",")):
        found = [g for g in gpus if name == str(g.device_index) or (len(name) > 4 and g.uuid.startswith(name))]
        if len(found) != 1:
            break
        shown += found
    return shown


def _by_uuid(uuid: str, visible: str | None) -> Target:
    gpus = _visible(_gpus(), visible)
    found = [g for g in gpus if len(uuid) > 4 and g.uuid.startswith(uuid)]
    if len(found) != 1:
        how = "names several GPUs" if found else "is none of the GPUs that are visible"
        known = ", ".join(g.uuid for g in gpus) or "there are none"
        raise TargetError(f"device {uuid!r} {how} here: {known}; see nvidia-smi -L")
    return found[0]


def _driver() -> str:
    with _Nvml() as nvml:
        return str(nvml.nvmlSystemGetDriverVersion()) if nvml else ""


def _gpus() -> list[Target]:
    with _Nvml() as nvml:
        if nvml is None:
            return []
        return [_gpu(nvml, i) for i in range(nvml.nvmlDeviceGetCount())]


def _gpu(nvml: Any, index: int) -> Target:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    # wgmma and tcgen05 exist only in the "a" variants of the architectures
    suffix = "a" if major >= 9 else ""
    try:
        # 128 FP32 lanes an SM since Ampere's GA10x, and on Hopper and Blackwell; GA100, Volta and Turing have 64
        sms = nvml.nvmlDeviceGetNumGpuCores(handle) // (64 if major == 7 or (major, minor) == (8, 0) else 128)
    except nvml.NVMLError:
        sms = 0
    try:
        cap = int(nvml.nvmlDeviceGetEnforcedPowerLimit(handle)) // 1000
    except nvml.NVMLError:
        cap = None
    return Target(
        model=str(nvml.nvmlDeviceGetName(handle)),
        arch=f"sm_{major}{minor}{suffix}",
        num_sms=sms,
        power_cap_w=cap,
        device_index=index,
        uuid=str(nvml.nvmlDeviceGetUUID(handle)),
    )


class _Nvml:
    """NVML for the length of a with-block, or None where it is not to be had."""

    def __enter__(self) -> Any:
        self._nvml = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
        except Exception:  # no package, no driver, no permission: all mean "no GPU to see here"
            return None
        return self._nvml

    def __exit__(self, *_: object) -> None:
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
