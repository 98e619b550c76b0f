"""Binding of the C core. `ffi` and `lib` are the raw cffi handles; `keys` the typed entrance."""

from infera_core._native import ffi, lib

__all__ = ["ffi", "lib"]
