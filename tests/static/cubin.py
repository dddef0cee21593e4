"""What the compiled code of a GPU kernel needs, read from its ELF file: registers and stack of a thread.

NVRTC writes them as attributes into the section ``.nv.info``: records of a format, an attribute, and a size or value.
Those of functions are pairs of numbers: a symbol, and what it needs.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

REGISTERS, FRAME, LEAST_STACK = 0x2F, 0x11, 0x12
"""EIATTR_REGCOUNT, EIATTR_FRAME_SIZE and EIATTR_MIN_STACK_SIZE."""

SIZED = 0x04
"""EIFMT_SVAL: as many bytes follow as the record says. Records of other formats are four bytes long."""

_SYMBOLS = 2  # SHT_SYMTAB


class Needs(NamedTuple):
    """What a thread of a kernel needs: registers, and bytes of stack in memory."""

    registers: int
    stack: int

    def warps_at_once(self, block: int) -> int:
        """Number of warps that a multiprocessor of an H100 runs at once, if registers are the limit.

        Each of its four parts has 16,384 registers, given to warps in units of 256, and runs 16 warps at most. There is
        room for 32 blocks. Source: CUDA C++ Programming Guide, technical specifications of compute capability 9.0.
        """
        in_part = min(16, 16384 // (256 * -(-self.registers // 8)))
        in_block = block // 32
        return min(4 * in_part // in_block, 32) * in_block


class _Section(NamedTuple):
    name: str
    kind: int
    content: bytes
    link: int


def needs(path: Path) -> dict[str, Needs]:
    """Of each kernel in a cubin, by its name in the file.

    Raises
    ------
    ValueError
        The file is not what is expected of a cubin.
    """
    sections = _sections(path.read_bytes())
    names = _symbols(sections)
    found: dict[str, dict[int, int]] = {}
    for section in sections:
        if section.name != ".nv.info":
            continue
        for attribute, payload in _records(section.content):
            if attribute in (REGISTERS, FRAME, LEAST_STACK):
                symbol, value = struct.unpack("<II", payload)
                found.setdefault(names[symbol], {})[attribute] = value
    kernels = {name: values for name, values in found.items() if LEAST_STACK in values}  # others are called by them
    if not kernels or any(set(values) != {REGISTERS, FRAME, LEAST_STACK} for values in kernels.values()):
        raise ValueError(f"{path} does not tell registers and stack of its kernels: {found}")
    # the least stack of a kernel includes that of the functions that it calls
    return {name: Needs(v[REGISTERS], max(v[FRAME], v[LEAST_STACK])) for name, v in kernels.items()}


def _records(content: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(content):
        form, attribute, size = struct.unpack_from("<BBH", content, at)
        at += 4
        payload = content[at : at + size] if form == SIZED else b""
        at += len(payload)
        yield attribute, payload


def _sections(data: bytes) -> list[_Section]:
    if data[:5] != b"\x7fELF\x02":
        raise ValueError("not an ELF file of 64 bits")
    (start,) = struct.unpack_from("<Q", data, 0x28)
    size, count, of_names = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, start + size * k) for k in range(count)]
    text_at, text_size = headers[of_names][4:6]
    text = data[text_at : text_at + text_size]
    return [
        _Section(_text(text, header[0]), header[1], data[header[4] : header[4] + header[5]], header[6])
        for header in headers
    ]


def _symbols(sections: list[_Section]) -> list[str]:
    (table,) = (s for s in sections if s.kind == _SYMBOLS)
    text = sections[table.link].content
    return [_text(text, struct.unpack_from("<I", table.content, at)[0]) for at in range(0, len(table.content), 24)]


def _text(strings: bytes, at: int) -> str:
    return strings[at : strings.index(b"\0", at)].decode()
