"""An adapter is its content: the digest changes with every file that counts and with nothing else."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from infera.engine import adapters
from infera.engine.adapters import AdapterError, DigestReader, adapter_folder, adapter_stamp, read_digest


def make(folder: Path, weights: bytes = b"w", config: str = "{}", name: str = "adapter_model.safetensors") -> Path:
    """An adapter's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(config)
    (folder / name).write_bytes(weights)
    return folder


def digest(folder: Path) -> bytes:
    return read_digest(folder, adapter_stamp(folder))


def test_the_content_counts_and_the_name_does_not(tmp_path: Path) -> None:
    one = digest(make(tmp_path / "one"))
    assert one == digest(make(tmp_path / "two"))
    assert len(one) == adapters.DIGEST_BYTES
    others = [
        make(tmp_path / "weights", b"v"),
        make(tmp_path / "config", config='{"r": 8}'),
        make(tmp_path / "kind", name="adapter_model.bin"),
        make(make(tmp_path / "more"), name="new_embeddings.safetensors"),
        make(tmp_path / "moved", b"", "{}w"),
    ]
    (others[3] / "notes.txt").write_text("not read")
    assert len({one, *map(digest, others)}) == len(others) + 1


def test_weights_longer_than_a_read_are_read_whole(tmp_path: Path) -> None:
    long = os.urandom(adapters.CHUNK_BYTES + 1)
    one = digest(make(tmp_path / "a", long))
    assert one != digest(make(tmp_path / "b", long[:-1] + bytes([long[-1] ^ 1])))


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_folder_without_an_adapter_says_what_is_missing(tmp_path: Path, missing: str) -> None:
    folder = make(tmp_path / "a")
    (folder / missing).unlink()
    with pytest.raises(AdapterError, match=r"holds no adapter_config\.json with weights"):
        adapter_stamp(folder)
    with pytest.raises(AdapterError, match="path of the folder"):
        adapter_stamp(Path("some-user/some-adapter"))


def test_a_directory_in_the_place_of_weights_is_none(tmp_path: Path) -> None:
    folder = make(tmp_path / "a")
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.safetensors").mkdir()
    with pytest.raises(AdapterError, match="weights"):
        adapter_stamp(folder)


def test_a_file_that_changes_while_it_is_read_has_no_digest(tmp_path: Path) -> None:
    folder = make(tmp_path / "a")
    stamp = adapter_stamp(folder)
    make(folder, b"other")
    with pytest.raises(AdapterError, match="written to"):
        read_digest(folder, stamp)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterError, match="cannot be read"):
        read_digest(folder, stamp)


def test_paths_are_taken_as_an_engine_takes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert adapter_folder("~/x") == adapter_folder("x") == adapter_folder(str(tmp_path / "x")) == tmp_path / "x"


def test_the_reader_reads_each_content_once_and_all_that_is_asked_for(tmp_path: Path) -> None:
    reader = DigestReader()
    folders = [make(tmp_path / str(number), bytes([number])) for number in range(20)]
    contents = [(folder, adapter_stamp(folder)) for folder in folders]
    assert [reader.find(content) for content in contents] == [None] * 20
    reader.wait(10)
    assert [reader.find(content) for content in contents] == [digest(folder) for folder in folders]
    assert reader._thread is None


def test_the_reader_says_once_what_failed_and_tries_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, folder = DigestReader(), make(tmp_path / "a")
    content = (folder, adapter_stamp(folder))

    def fail(*_: object) -> bytes:
        raise AdapterError("the disk is gone")

    monkeypatch.setattr(adapters, "read_digest", fail)
    for _ in range(2):
        assert reader.find(content) is None
        reader.wait(10)
        with pytest.raises(AdapterError, match="disk is gone"):
            reader.find(content)
    monkeypatch.undo()
    assert reader.find(content) is None
    reader.wait(10)
    assert reader.find(content) == digest(folder)


def test_what_the_reader_keeps_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "REMEMBERED_MAX", 3)
    gate = threading.Event()

    def slow(*content: object) -> bytes:
        gate.wait(10)
        return b"digest"

    monkeypatch.setattr(adapters, "read_digest", slow)
    reader = DigestReader()
    contents = [(tmp_path / str(number), ()) for number in range(6)]
    for content in contents:
        reader.find(content)
    assert len(reader._wanted) == 3
    gate.set()
    reader.wait(10)
    for content in contents[3:5]:
        reader.find(content)
    reader.wait(10)
    assert len(reader._found) == 3
