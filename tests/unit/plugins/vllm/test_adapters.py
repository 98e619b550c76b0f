"""Which weights a request computes with, through every way an engine can load and replace an adapter."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from infera_vllm import adapters
from infera_vllm.adapters import AdapterDigests, AdapterPendingError

from infera.engine.adapters import AdapterError, adapter_stamp, read_digest
from tests.unit.engine.test_adapters import make


def lora(folder: Path, number: int = 1, name: str = "mine", **more: Any) -> Any:
    """vLLM's LoRARequest."""
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=str(folder), **more)


def ask(digests: AdapterDigests, request: Any) -> bytes:
    """The digest, after the files have been read."""
    with contextlib.suppress(AdapterPendingError):
        return digests.adapter_digest(request)
    digests.wait(10)
    return digests.adapter_digest(request)


def test_nobody_waits_for_files(tmp_path: Path) -> None:
    digests = AdapterDigests()
    with pytest.raises(AdapterPendingError, match="being read"):
        digests.adapter_digest(lora(make(tmp_path / "a")))


def test_names_do_not_count(tmp_path: Path) -> None:
    digests, folder = AdapterDigests(), make(tmp_path / "a")
    assert ask(digests, lora(folder)) == read_digest(folder, adapter_stamp(folder))
    assert ask(digests, lora(make(tmp_path / "b"), 2, "other")) == digests.adapter_digest(lora(folder))
    assert digests.is_current(lora(folder), digests.adapter_digest(lora(folder)))


def test_an_old_name_with_other_content_is_another_adapter(tmp_path: Path) -> None:
    """Unloaded and loaded again: the engine gives a new number, the path may be the old one."""
    digests, folder = AdapterDigests(), make(tmp_path / "a")
    old = ask(digests, lora(folder, 1))
    make(folder, b"other weights")
    assert ask(digests, lora(folder, 2)) != old


def test_files_changed_under_a_loaded_adapter_have_no_digest(tmp_path: Path) -> None:
    """The engine may have read the old ones or, after dropping the adapter from its memory, the new ones."""
    digests, folder = AdapterDigests(), make(tmp_path / "a")
    ask(digests, lora(folder))
    make(folder, b"other weights")
    for _ in range(2):
        with pytest.raises(AdapterError, match="changed after it was loaded.*load it again"):
            digests.adapter_digest(lora(folder))


def test_an_adapter_replaced_in_place_is_not_current_any_more(tmp_path: Path) -> None:
    digests, first, second = AdapterDigests(), make(tmp_path / "a"), make(tmp_path / "b", b"second")
    old = ask(digests, lora(first))
    new = ask(digests, lora(second, load_inplace=True))
    assert not digests.is_current(lora(first), old)
    assert digests.is_current(lora(second), new)
    make(second, b"third weights")
    assert ask(digests, lora(second, load_inplace=True)) not in (old, new)


def test_what_cannot_be_read_says_so_and_is_tried_again(tmp_path: Path) -> None:
    digests, folder = AdapterDigests(), tmp_path / "a"
    with pytest.raises(AdapterError, match="holds no"):
        digests.adapter_digest(lora(folder))
    make(folder)
    (folder / "adapter_model.safetensors").chmod(0)
    if os.access(folder / "adapter_model.safetensors", os.R_OK):
        (folder / "adapter_model.safetensors").chmod(0o600)
        assert ask(digests, lora(folder))
        return
    with pytest.raises(AdapterError, match="cannot be read"):
        ask(digests, lora(folder))
    (folder / "adapter_model.safetensors").chmod(0o600)
    assert ask(digests, lora(folder))


def test_fused_expert_weights_are_not_taken_for_the_others(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="fused expert"):
        AdapterDigests().adapter_digest(lora(make(tmp_path / "a"), is_3d_lora_weight=True))


def test_what_is_remembered_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "LOADED_MAX", 3)
    digests = AdapterDigests()
    for number in range(1, 6):
        ask(digests, lora(make(tmp_path / str(number)), number))
    assert list(digests._loaded) == [3, 4, 5]
