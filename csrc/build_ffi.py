"""Builds `infera_core._native` through cffi (API mode, stable ABI).

The declarations cffi needs are the part of each public header between `/* cffi: begin */` and
`/* cffi: end */`, so that they are written once.
"""

from __future__ import annotations

import platform
import re
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent
HEADERS = [
    "content_key.h",
    "score.h",
    "checksum.h",
    "arena.h",
    "store.h",
    "store_policy.h",
    "store_list.h",
    "memory.h",
    "ring.h",
    "loop.h",
    "cachemap.h",
    "loadtable.h",
    "disk_format.h",
    "disk_store.h",
]
SOURCES = [
    "blake3.c",
    "content_key.c",
    "score.c",
    "checksum.c",
    "arena.c",
    "lookups.c",
    "extents.c",
    "store.c",
    "store_class.c",
    "store_index.c",
    "store_evict.c",
    "store_policy.c",
    "store_reserve.c",
    "store_list.c",
    "store_adopt.c",
    "memory.c",
    "ring.c",
    "loop.c",
    "loop_frames.c",
    "loop_ring.c",
    "cachemap.c",
    "cachemap_set.c",
    "cachemap_index.c",
    "cachemap_sweep.c",
    "cachemap_view.c",
    "cachemap_match.c",
    "cachemap_audit.c",
    "cachemap_engine.c",
    "cachemap_extras.c",
    "cachemap_pages.c",
    "cachemap_decode.c",
    "cachemap_kvd.c",
    "loadtable.c",
    "disk_format.c",
    "disk_io.c",
    "disk_queue.c",
    "disk_ring.c",
    "disk_index.c",
    "disk_job.c",
    "disk_load.c",
    "disk_merge.c",
    "disk_device.c",
    "disk_transfer.c",
    "disk_append.c",
    "disk_reclaim.c",
    "disk_store.c",
]
COMPILE_ARGS = ["-std=gnu11", "-O3", "-Wall", "-Wextra", "-Werror=implicit-function-declaration"]


def declarations(header: Path) -> str:
    """Return what stands between the header's cffi markers.

    Raises:
        RuntimeError: when the header has no such part.
    """
    parts = re.findall(r"/\* cffi: begin \*/(.*?)/\* cffi: end \*/", header.read_text(), re.S)
    if not parts:
        raise RuntimeError(f"{header.name} has no part for cffi")
    return "".join(parts)


ffi = FFI()
ffi.cdef("\n".join(declarations(HERE / header) for header in HEADERS))
ffi.set_source(
    "infera_core._native",
    "\n".join(f'#include "{header}"' for header in HEADERS),
    # setuptools wants source paths relative to the project's root.
    sources=[f"csrc/{source}" for source in SOURCES],
    include_dirs=[str(HERE)],
    extra_compile_args=COMPILE_ARGS,
    libraries=[] if platform.system() == "Darwin" else ["rt"],
    py_limited_api=True,
    define_macros=[("Py_LIMITED_API", "0x030B0000")],
)
