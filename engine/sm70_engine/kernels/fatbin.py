"""Packs a family's machine code and PTX into one fat object, with the fatbin library of a package wheel (no toolkit).

The driver then chooses: the cubin on a card of compute capability 7.x, the PTX on anything newer.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from .errors import KernelError

ARCHITECTURE = b"70"


def pack(library: Path, name: str, cubin: bytes, ptx: bytes) -> bytes:
    """One fatbin of both, compressed; the same bytes for the same input. Raises `KernelError`.

    `library`: libnvfatbin. `name`: what tools show beside the code.
    """
    nvfatbin = ctypes.CDLL(str(library))
    nvfatbin.nvFatbinGetErrorString.restype = ctypes.c_char_p
    fatbin = ctypes.c_void_p()

    def call(function: str, *arguments: object) -> None:
        status = getattr(nvfatbin, function)(*arguments)
        if status:
            reason = (nvfatbin.nvFatbinGetErrorString(status) or b"?").decode()
            raise KernelError(f"{name} cannot be packed into a fat object: {function}: {reason}")

    options = (ctypes.c_char_p * 2)(b"-64", b"-compress-all")
    call("nvFatbinCreate", ctypes.byref(fatbin), options, ctypes.c_size_t(len(options)))
    try:
        text, label = ctypes.create_string_buffer(ptx), name.encode()  # PTX goes in with its terminating zero
        code, size = ctypes.create_string_buffer(cubin, len(cubin)), ctypes.c_size_t()
        call("nvFatbinAddCubin", fatbin, code, ctypes.c_size_t(len(cubin)), ARCHITECTURE, label)
        call("nvFatbinAddPTX", fatbin, text, ctypes.c_size_t(len(text)), ARCHITECTURE, label, b"")
        call("nvFatbinSize", fatbin, ctypes.byref(size))
        packed = ctypes.create_string_buffer(size.value)
        call("nvFatbinGet", fatbin, packed)
        return packed.raw
    finally:
        nvfatbin.nvFatbinDestroy(ctypes.byref(fatbin))
