"""What ``flashtune doctor`` finds out about the machine and its software, one function a subject.

Torch and CuTeDSL are imported in children only: either may hang or abort the process that imports it.
"""

from __future__ import annotations

import enum
import importlib.metadata as metadata
import json
import platform
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner import target
from tuner.errors import InputError, TargetError
from tuner.families import cubin
from tuner.target import Target

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_IMPORT_TIMEOUT_S = 120  # importing torch from a cold disk has taken half a minute
_COMPILE_TIMEOUT_S = 60

_TORCH = """
import json, torch
found = {"version": torch.__version__, "cuda": torch.version.cuda, "device": "", "cxx": ""}
if torch.cuda.is_available():
    found["device"] = torch.cuda.get_device_name()
try:
    from torch._inductor.cpp_builder import get_cpp_compiler
    found["cxx"] = get_cpp_compiler()
except Exception:
    pass
print(json.dumps(found))
"""
_CUTLASS = "import cutlass, cutlass.cute, json; print(json.dumps(cutlass.__version__))"
_CPP = """
#include <Python.h>
#include <omp.h>
int threads() { return omp_get_max_threads(); }
"""


class Level(enum.StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"  # something is slower, or not to be had
    FAIL = "fail"  # tuning would fail


@dataclass(frozen=True)
class Check:
    """One finding: what was seen, and what to do about it."""

    name: str
    level: Level
    seen: str
    next_step: str = ""


def failed(name: str, error: InputError) -> Check:
    """Return the finding of an error, whose message ends in the next step."""
    seen, _, next_step = str(error).rpartition("; ")
    return Check(name, Level.FAIL, seen or next_step, next_step if seen else "")


def python() -> list[Check]:
    """Compare this Python with what flashtune asks for."""
    from packaging.specifiers import SpecifierSet

    version = platform.python_version()
    seen = f"{version}, {sys.executable}"
    try:
        wanted = metadata.metadata("flashtune")["Requires-Python"]
    except metadata.PackageNotFoundError:
        return [Check("python", Level.OK, seen)]
    if not SpecifierSet(wanted).contains(version, prereleases=True):
        return [Check("python", Level.FAIL, f"{seen}; flashtune needs {wanted}", "make the environment with another")]
    return [Check("python", Level.OK, seen)]


def packages() -> list[Check]:
    """Compare what is installed with what each extra of flashtune asks for."""
    try:
        metadata.distribution("flashtune")
    except metadata.PackageNotFoundError:
        seen = "flashtune is not installed as a package, so what it needs is not known"
        return [Check("packages", Level.WARN, seen, "pip install -e . in its folder")]
    return [_extra(extra) for extra in ("service", "cpu", "compile", "gpu")]


def _extra(extra: str) -> Check:
    missing, wrong, right = [], [], []
    for need in _needs("flashtune", extra):
        version = target.version_of(need.name)
        if not version:
            missing.append(f"{need.name}{need.specifier}")
        elif not need.specifier.contains(version, prereleases=True):
            wrong.append(f"{need.name} {version} (needs {need.specifier})")
        else:
            right.append(f"{need.name} {version}")
    name, next_step = f"packages [{extra}]", f"pip install 'flashtune[{extra}]'"
    if wrong:
        return Check(name, Level.FAIL, "wrong versions: " + ", ".join(wrong), next_step)
    if not missing:
        return Check(name, Level.OK, ", ".join(right))
    if extra == "gpu" and not _has_driver():
        return Check(name, Level.OK, "not needed: no NVIDIA driver is loaded here")
    return Check(name, Level.FAIL if extra == "service" else Level.WARN, "missing: " + ", ".join(missing), next_step)


def _needs(package: str, extra: str) -> Iterator[Requirement]:
    """Yield what an extra adds to a package, and what the extras of these add in turn."""
    from packaging.requirements import Requirement

    try:
        texts = metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return
    for need in map(Requirement, texts):
        by_extra = need.marker and need.marker.evaluate({"extra": extra}) and not need.marker.evaluate({"extra": ""})
        if by_extra and need.name != "flashtune":
            yield need
            for more in sorted(need.extras):
                yield from _needs(need.name, more)


def gpu(visible_devices: str | None) -> list[Check]:
    """List the GPUs that NVML shows."""
    gpus = _gpus()
    if gpus:
        driver = target.toolchain().driver
        seen = f"driver {driver}: " + ", ".join(f"{g.model} ({g.arch}, {g.num_sms} SMs)" for g in gpus)
        if visible_devices == "":
            return [Check("gpu", Level.WARN, f"{seen}; CUDA_VISIBLE_DEVICES is empty", "unset it to tune on a GPU")]
        return [Check("gpu", Level.OK, seen), *persistence()]
    if _has_driver():
        seen = "an NVIDIA driver is loaded, and NVML shows no GPU"
        return [Check("gpu", Level.FAIL, seen, "pip install nvidia-ml-py, then see what nvidia-smi says")]
    cpu = target.probe("cpu")
    return [Check("gpu", Level.OK, f"no NVIDIA GPU: tunes on the CPU, {cpu.model} ({cpu.num_sms} cores)")]


def persistence() -> list[Check]:
    """Look whether the driver stays loaded while nobody uses a GPU: measuring children come and go."""
    command = ["nvidia-smi", "--query-gpu=index,persistence_mode", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []  # NVML answered, and says what matters more
    off = [line.split(",")[0].strip() for line in done.stdout.splitlines() if line.endswith("Disabled")]
    if off:
        seen = f"off for GPU {', '.join(off)}: every start of a measuring child loads the driver again"
        return [Check("persistence", Level.WARN, seen, "run nvidia-persistenced, or nvidia-smi -pm 1 as root")]
    return [Check("persistence", Level.OK, "the driver stays loaded")] if "Enabled" in done.stdout else []


def _gpus() -> list[Target]:
    found: list[Target] = []
    while True:
        try:
            found.append(target.probe(f"cuda:{len(found)}"))
        except TargetError:
            return found


def _has_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists()


def torch(visible_devices: str | None) -> list[Check]:
    """Import torch in a child, and try the C++ compiler that it would use."""
    if not target.version_of("torch"):
        return [Check("torch", Level.WARN, "not installed: this machine cannot tune", "pip install 'flashtune[cpu]'")]
    found, fault = _child(_TORCH)
    if found is None:
        return [Check("torch", Level.FAIL, f"importing it failed: {fault}", "install torch again")]
    seen = f"{found['version']}, built for {'CUDA ' + found['cuda'] if found['cuda'] else 'the CPU'}"
    wants_gpu = visible_devices != "" and bool(_gpus())
    check = Check("torch", Level.OK, f"{seen}, sees {found['device'] or 'no GPU'}")
    if wants_gpu and not found["device"]:
        next_step = "install a torch built for the CUDA version that nvidia-smi shows, or a newer driver"
        check = Check("torch", Level.FAIL, f"{seen}, does not see the GPU", next_step)
    return [check, _compiler(found["cxx"], Level.WARN if wants_gpu else Level.FAIL)]


def _compiler(command: str, level: Level) -> Check:
    """Compile what torch's C++ kernels include: Python's headers and OpenMP."""
    name = "C++ compiler"
    if not command:
        seen = "torch finds none, and FlexAttention on a CPU needs one"
        return Check(name, level, seen, "install g++ (apt-get install g++), or set CXX")
    with tempfile.TemporaryDirectory(prefix="flashtune-") as folder:
        Path(folder, "try.cpp").write_text(_CPP)
        flags = ["-std=c++17", "-fopenmp", "-shared", "-fPIC", "-I", sysconfig.get_paths()["include"]]
        try:
            done = subprocess.run(
                [command, *flags, "try.cpp", "-o", "try.so"],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=_COMPILE_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as e:
            return Check(name, level, f"{command}: {e}", "install g++ again, or set CXX to another compiler")
    if done.returncode:
        line = next((text for text in done.stderr.splitlines() if "error" in text), done.stderr.strip()[:200])
        next_step = "install g++ with OpenMP and Python's headers (apt-get install g++ python3-dev)"
        return Check(name, level, f"{command}: {line}", next_step)
    return Check(name, Level.OK, f"{command} compiles with OpenMP and Python's headers")


def flash_attention() -> list[Check]:
    """Say which FA4 is installed, and whether its compiler can be imported."""
    fingerprint = target.toolchain().flash_attn_4
    if not fingerprint:
        seen = "not installed: FlashAttention-4 is neither compiled nor tuned here"
        return [Check("FA4", Level.WARN, seen, "pip install 'flashtune[compile]'")]
    version, _, digest = fingerprint.partition(":")
    checks = [Check("FA4", Level.OK, f"flash-attn-4 {version}, sources {digest}")]
    found, fault = _child(_CUTLASS)
    if found is None:
        next_step = "pip install 'flashtune[compile]' again"
        return [*checks, Check("CuTeDSL", Level.FAIL, f"importing cutlass failed: {fault}", next_step)]
    return [*checks, Check("CuTeDSL", Level.OK, f"cutlass {found}")]


def cuobjdump() -> list[Check]:
    """Find the tool that reads registers and spills out of compiled kernels."""
    path = cubin.tool("cuobjdump")
    if path is None:
        seen = "not found: registers and spills of compiled kernels are not shown"
        return [Check("cuobjdump", Level.WARN, seen, "pip install triton, or put CUDA's bin folder on the PATH")]
    return [Check("cuobjdump", Level.OK, path)]


def _child(code: str) -> tuple[Any, str]:
    """Run code in a fresh Python; return what it printed last, as JSON, or None and what went wrong."""
    try:
        done = subprocess.run(
            # -P keeps the working directory off sys.path: a user's own torch.py must not be found
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_IMPORT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer after {_IMPORT_TIMEOUT_S} s"
    if done.returncode == 0 and done.stdout.strip():
        return json.loads(done.stdout.strip().splitlines()[-1]), ""
    last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return None, last
