"""Compiles one source with NVRTC, through ctypes: no toolkit, no driver and no GPU needed."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import KernelError


@dataclass(frozen=True)
class Usage:
    """What ptxas says about one kernel of a cubin; bytes per thread for stack and spills, per block for shared."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int


_ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)'.*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


def parse_usage(log: str) -> dict[str, Usage]:
    """The kernels that a `ptxas -v` log speaks of."""
    usage = {}
    for match in _ENTRY.finditer(log):
        shared = re.search(r"(\d+) bytes smem", match["rest"])
        usage[match["name"]] = Usage(
            registers=int(match["registers"]),
            stack=int(match["stack"]),
            spill_stores=int(match["stores"]),
            spill_loads=int(match["loads"]),
            shared=int(shared[1]) if shared else 0,
        )
    return usage


def compile_source(library: Path, source: Path, architecture: str, options: Sequence[str] = ()) -> tuple[bytes, str]:
    """Machine code (`sm_70`) or PTX (`compute_70`) of a source file, and the compiler's log.

    Raises `KernelError` with the log when the source does not compile.
    """
    nvrtc = ctypes.CDLL(str(library))
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    code = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.read_bytes(), source.name.encode(), 0, None, None)
    if code:
        raise KernelError(f"NVRTC could not take {source}: error {code}")
    try:
        words = [f"--gpu-architecture={architecture}", "--std=c++17", "-default-device", "-I", str(source.parent)]
        encoded = [word.encode() for word in (*words, *options)]
        code = nvrtc.nvrtcCompileProgram(program, len(encoded), (ctypes.c_char_p * len(encoded))(*encoded))
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, buffer)
        log = buffer.value.decode(errors="replace")
        if code:
            raise KernelError(f"{source.name} does not compile for {architecture}:\n{log.strip()}")
        kind = "CUBIN" if architecture.startswith("sm_") else "PTX"
        getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, f"nvrtcGet{kind}")(program, buffer)
        # The PTX comes with its terminating zero.
        return (buffer.raw if kind == "CUBIN" else buffer.value), log
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
