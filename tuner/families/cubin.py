"""Resource figures of a compiled kernel: registers, stack and code size, read from its cubin.

CuTeDSL's ``.o`` files hold the cubin as a second ELF image; ``cuobjdump`` (triton carries one)
reads it. Dynamic shared memory is decided at launch and is not in there.
"""

from __future__ import annotations

import importlib.metadata as metadata
import re
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

from tuner.trial import Resources

_EM_CUDA = 190  # e_machine of a cubin (ELF registry: NVIDIA CUDA architecture)


def resources(object_file: Path) -> Resources:
    """Read the figures of the heaviest kernel in an object file; empty Resources without tools."""
    reader = tool("cuobjdump")
    image = embedded_cubin(object_file.read_bytes())
    if reader is None or image is None:
        return Resources()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(image)
        f.flush()
        # cuobjdump takes 0.1 s; a minute means it hangs
        done = subprocess.run([reader, "-res-usage", f.name], capture_output=True, text=True, timeout=60, check=False)
    return parse_usage(done.stdout + done.stderr, len(image))


def parse_usage(text: str, code_bytes: int | None = None) -> Resources:
    """Read ``cuobjdump -res-usage``: REG per thread, STACK in bytes, SHARED static."""
    registers = [int(x) for x in re.findall(r"\bREG:(\d+)", text)]
    if not registers:
        return Resources()
    stack = [int(x) for x in re.findall(r"\bSTACK:(\d+)", text)]
    shared = [int(x) for x in re.findall(r"\bSHARED:(\d+)", text)]
    return Resources(max(registers), max(stack, default=0), max(shared, default=0), code_bytes)


def embedded_cubin(data: bytes) -> bytes | None:
    """Return the CUDA ELF image inside an object file, up to the end of its section headers."""
    start = data.find(b"\x7fELF", 0)
    while start >= 0:
        header = data[start : start + 64]
        if len(header) == 64 and struct.unpack_from("<H", header, 18)[0] == _EM_CUDA:
            program, sections = struct.unpack_from("<QQ", header, 32)
            psize, pcount, ssize, scount = struct.unpack_from("<HHHH", header, 54)
            return data[start : start + max(sections + ssize * scount, program + psize * pcount)]
        start = data.find(b"\x7fELF", start + 4)
    return None


def tool(name: str) -> str | None:
    """Return the path of a CUDA binary utility, triton's own before the PATH's; None without one."""
    try:
        carried = Path(str(metadata.distribution("triton").locate_file(f"triton/backends/nvidia/bin/{name}")))
    except metadata.PackageNotFoundError:
        return shutil.which(name)
    return str(carried) if carried.exists() else shutil.which(name)
