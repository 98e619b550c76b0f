"""The structs of the arena's files, read from their header, for whoever checks or reads them without our C code."""

from __future__ import annotations

import re
from pathlib import Path

from cffi import FFI

HEADER = Path(__file__).parents[2] / "csrc" / "arena.h"


def layout() -> FFI:
    """An FFI that knows every struct of the layout."""
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.S)
    constants = text[text.index("enum {") : text.index("#define ARENA_NO_SLOT")]
    structs = text[text.index("#define ARENA_MAGIC_INDEX") : text.rindex("typedef struct {\n    uint64_t bucket[2];")]
    structs = re.sub(r"_Static_assert\(.*?\);", "", structs, flags=re.S)
    structs = re.sub(r"^#define.*$", "", structs, flags=re.M).replace("_Atomic ", "")
    found = FFI()
    found.cdef(constants + structs)
    return found


def table(ffi: FFI, struct: str) -> list[tuple[int, int, str]]:
    """Offset, size and name of each field that is not padding."""
    fields = ffi.typeof(struct).fields
    return [(field.offset, ffi.sizeof(field.type), name) for name, field in fields if "padding" not in name]
