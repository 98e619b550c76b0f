"""What weights a model folder holds, without reading all of them."""

from __future__ import annotations

import hashlib
from pathlib import Path

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
WHOLE_FILE_BYTES_MAX = 8 << 20
SAMPLES = 64
SAMPLE_BYTES = 16 * 1024


def weights_identity(model: str, revision: str | None) -> str:
    """A digest of a local model folder: its configuration and its weights.

    A file up to 8 MiB is read whole; of a larger one the size, the time of its last change and 64
    samples of 16 KiB spread evenly count, 1 MiB however large it is. Samples alone could miss a
    difference in a few tensors; the time cannot, and costs only that a copied folder does not share
    with its original. A name that is not a folder stands for itself with its revision.
    """
    folder = Path(model)
    if not folder.is_dir():
        return f"name:{model}@{revision}"
    digest = hashlib.blake2b(digest_size=16)
    names = [folder / "config.json"]
    names += sorted(path for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES)
    for path in names:
        if path.is_file():
            _add_file(digest, path)
    return f"content:{digest.hexdigest()}"


def _add_file(digest: hashlib.blake2b, path: Path) -> None:
    facts = path.stat()
    size = facts.st_size
    digest.update(f"{path.name}\0{size}\0".encode())
    with path.open("rb") as file:
        if size <= WHOLE_FILE_BYTES_MAX:
            digest.update(file.read())
            return
        digest.update(f"{facts.st_mtime_ns}\0".encode())
        step = (size - SAMPLE_BYTES) // (SAMPLES - 1)
        for sample in range(SAMPLES):
            file.seek(sample * step)
            digest.update(file.read(SAMPLE_BYTES))
