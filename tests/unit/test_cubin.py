"""Resource figures of compiled kernels: the tool's text, and the CUDA image inside an object file."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

import pytest

from tuner.families import cubin
from tuner.trial import Resources

EM_X86_64, EM_CUDA = 62, 190

TWO_KERNELS = """\
Resource usage:
 Common:
  GLOBAL:0
 Function kernel_cutlass_prepare_0:
  REG:24 STACK:96 SHARED:0 LOCAL:0 CONSTANT[0]:528 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function kernel_cutlass_flash_fwd_1:
  REG:168 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:1232 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


def elf(machine: int, body: bytes, sections: int = 3, programs: int = 2) -> bytes:
    """A 64-bit little-endian ELF image: header, program headers, body, section headers."""
    header, program_size, section_size = 64, 56, 64
    section_offset = header + programs * program_size + len(body)
    head = b"\x7fELF" + bytes([2, 1, 1, 51]) + bytes(8)
    head += struct.pack("<HHIQQQI", 2, machine, 1, 0, header, section_offset, 0x5A)
    head += struct.pack("<HHHHHH", header, program_size, programs, section_size, sections, sections - 1)
    assert len(head) == header
    return head + bytes(programs * program_size) + body + b"S" * (sections * section_size)


CUBIN = elf(EM_CUDA, b"SASS" * 40)
HOST = elf(EM_X86_64, b"host code" * 10)


def test_the_heaviest_of_several_kernels_counts() -> None:
    assert cubin.parse_usage(TWO_KERNELS, 4096) == Resources(168, 96, 1024, 4096)


def test_one_kernel() -> None:
    text = " Function k:\n  REG:255 STACK:840 SHARED:49152 LOCAL:0 CONSTANT[0]:528 TEXTURE:0\n"
    assert cubin.parse_usage(text) == Resources(255, 840, 49152, None)


@pytest.mark.parametrize(
    "text", ["", "cuobjdump fatal   : File 'x' is not in ELF format", "REG: STACK:", "REGISTERS:7 XREG:9"]
)
def test_text_without_figures_gives_none(text: str) -> None:
    assert cubin.parse_usage(text, 4096) == Resources()


@pytest.mark.parametrize("before", [b"", HOST, HOST + b"\0" * 13, b"\x7fELF", b"\x7fEL\x7fELF noise" + HOST + HOST])
@pytest.mark.parametrize("after", [b"", b"trailing symbols" * 5, HOST])
def test_the_cuda_image_is_cut_out_to_the_byte(before: bytes, after: bytes) -> None:
    assert cubin.embedded_cubin(before + CUBIN + after) == CUBIN


def test_an_image_may_end_with_its_program_headers() -> None:
    """Section headers first, program headers last, as nvcc's older images have them."""
    image = bytearray(elf(EM_CUDA, b"", sections=3, programs=2))
    image[32:48] = struct.pack("<QQ", 64 + 3 * 64, 64)  # e_phoff behind e_shoff
    assert cubin.embedded_cubin(HOST + bytes(image) + b"more") == bytes(image)


def test_the_first_cuda_image_is_taken() -> None:
    other = elf(EM_CUDA, b"another" * 9)
    assert cubin.embedded_cubin(HOST + other + CUBIN) == other


@pytest.mark.parametrize(
    "data", [b"", b"garbage" * 100, HOST, b"\x7fELF", CUBIN[:40], HOST + CUBIN[:63], b"\x7fELF" * 50]
)
def test_without_a_cuda_image_there_is_none(data: bytes) -> None:
    assert cubin.embedded_cubin(data) is None


@pytest.mark.parametrize("data", [b"", b"garbage" * 100, HOST, HOST + CUBIN])
def test_an_object_that_no_tool_can_read_gives_no_figures(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "kernel.o"
    path.write_bytes(data)
    assert cubin.resources(path) == Resources()


def test_without_the_tool_there_are_no_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kernel.o"
    path.write_bytes(HOST + CUBIN)
    monkeypatch.setattr(cubin, "tool", lambda name: None)
    assert cubin.resources(path) == Resources()


def test_the_figures_come_from_the_embedded_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for cuobjdump that prints two kernels if it is given exactly the CUDA image."""
    path, expected, reader = tmp_path / "kernel.o", tmp_path / "expected", tmp_path / "cuobjdump"
    path.write_bytes(HOST + CUBIN + b"tail")
    expected.write_bytes(CUBIN)
    (tmp_path / "usage").write_text(TWO_KERNELS)
    reader.write_text(f'#!/bin/sh\ntest "$1" = -res-usage && cmp "$2" {expected} && cat {tmp_path}/usage\n')
    reader.chmod(0o755)
    monkeypatch.setattr(cubin, "tool", lambda name: str(reader) if name == "cuobjdump" else None)
    assert cubin.resources(path) == Resources(168, 96, 1024, len(CUBIN))


PTX = """\
.version 8.0
.target sm_90
.address_size 64
.visible .entry twice(.param .u64 at)
{
    .reg .b64 %rd<3>;
    .reg .f32 %f<2>;
    .shared .align 4 .b8 scratch[2048];
    ld.param.u64 %rd1, [at];
    mov.u64 %rd2, scratch;
    ld.global.f32 %f0, [%rd1];
    st.shared.f32 [scratch], %f0;
    bar.sync 0;
    ld.shared.f32 %f1, [scratch];
    add.f32 %f1, %f1, %f1;
    st.global.f32 [%rd1], %f1;
    ret;
}
"""


@pytest.mark.skipif(not (cubin.tool("ptxas") and cubin.tool("cuobjdump")), reason="needs ptxas and cuobjdump (triton)")
def test_a_real_kernel_is_read_with_the_real_tools(tmp_path: Path) -> None:
    source, image, path = tmp_path / "k.ptx", tmp_path / "k.cubin", tmp_path / "kernel.o"
    source.write_text(PTX)
    done = subprocess.run(
        [str(cubin.tool("ptxas")), "-v", "-arch=sm_90", str(source), "-o", str(image)],
        capture_output=True,
        text=True,
        check=True,
    )
    path.write_bytes(HOST + image.read_bytes() + b"tail")
    found = cubin.resources(path)
    assert (found.spill_bytes, found.code_bytes) == (0, image.stat().st_size)
    assert f"Used {found.registers} registers" in done.stderr  # ptxas' own account
    assert found.smem_bytes is not None
    assert found.smem_bytes >= 2048
