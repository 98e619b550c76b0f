"""A model's folder and its worker's render profile together decide the tokens, or say why they are not known."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from infera.discovery.record import PROBE_MESSAGES, PROBE_TEXT, RenderProfile, ids_digest
from infera.prompt.chat import chat_prompt, chat_text
from infera.prompt.outcome import UnrenderableError
from infera.prompt.probe import check_probes
from infera.prompt.tokenizer import ModelTokenizer
from tests.support.chat_templates import CHATML, HEADERS, TURNS
from tests.support.models import make_model_folder


def configure(folder: Path, **fields: Any) -> Path:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


def given(source: str, *, travels: bool = True) -> RenderProfile:
    digest = hashlib.sha256(source.encode()).hexdigest()
    return RenderProfile(chat_template=source if travels else None, chat_template_digest=digest)


def reason_of(folder: Path, profile: RenderProfile | None = None) -> str:
    with pytest.raises(UnrenderableError) as caught:
        ModelTokenizer(folder, profile).template_for(has_tools=False)
    return caught.value.reason


def test_the_engines_template_beats_the_folders(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "m", CHATML)
    for has_tools in (False, True):
        found = ModelTokenizer(folder, given(HEADERS)).template_for(has_tools=has_tools)
        assert found.template.source == HEADERS


def test_a_template_too_long_to_travel_is_found_by_its_digest(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "m", CHATML)
    (folder / "chat_template.jinja").write_text(HEADERS)
    found = ModelTokenizer(folder, given(HEADERS, travels=False)).template_for(has_tools=False)
    assert found.template.source == HEADERS
    assert reason_of(folder, given(CHATML, travels=False)) == "template_differs"


def test_tools_have_a_template_of_their_own_where_the_model_has_one(tmp_path: Path) -> None:
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": HEADERS}]
    tokenizer = ModelTokenizer(configure(make_model_folder(tmp_path / "m", None), chat_template=named))
    assert tokenizer.template_for(has_tools=False).template.source == CHATML
    assert tokenizer.template_for(has_tools=True).template.source == HEADERS
    assert tokenizer.template_for(has_tools=False, own="tool_use").template.source == HEADERS


@pytest.mark.parametrize(
    ("profile", "reason"),
    [
        (RenderProfile(tokenizer_mode="mistral"), "tokenizer_mode"),
        (RenderProfile(unrendered_flags=("--enable-prompt-embeds",)), "engine_flag"),
    ],
)
def test_engines_that_work_in_another_way_are_named(profile: RenderProfile, reason: str, tmp_path: Path) -> None:
    assert reason_of(make_model_folder(tmp_path / "m", CHATML), profile) == reason


def test_models_rendered_by_a_library_of_their_own_take_text_but_no_chats(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "m", CHATML)
    (folder / "config.json").write_text('{"model_type": "gpt_oss"}')
    assert reason_of(folder) == "rendered_elsewhere"
    assert len(ModelTokenizer(folder).encode_prompt("x", add_special_tokens=True)) == 1


def test_a_processors_template_makes_chats_unclear_and_nothing_else(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "m", CHATML)
    (folder / "chat_template.json").write_text("{}")
    assert reason_of(folder) == "template_unclear"
    assert len(ModelTokenizer(folder).encode("x", add_special_tokens=False)) == 1


def test_named_tokens_are_special_even_where_the_file_does_not_list_them(tmp_path: Path) -> None:
    folder = configure(make_model_folder(tmp_path / "m", None), pad_token="<pad>", additional_special_tokens=["<more>"])
    size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    ids = ModelTokenizer(folder).encode("<pad><more>", add_special_tokens=False).tolist()
    assert ids == [size, size + 1]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"added_tokens_decoder": {"9999": {"content": "<new>"}}}, "added_tokens_differ"),
        ({"added_tokens_decoder": {"1": {"content": "<|bos|>"}}}, "added_tokens_differ"),
        ({"split_special_tokens": True}, "split_special_tokens"),
    ],
)
def test_configurations_the_file_does_not_bear_out_are_named(
    fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    assert reason_of(configure(make_model_folder(tmp_path / "m", CHATML), **fields)) == reason


def probed(tokenizer: ModelTokenizer) -> dict[str, str]:
    text = tokenizer.encode(PROBE_TEXT, add_special_tokens=True).tolist()
    body = {"messages": list(PROBE_MESSAGES)}
    chat = tokenizer.encode(chat_text(tokenizer, chat_prompt(body, tokenizer.profile)), add_special_tokens=False)
    return {"text_probe_digest": ids_digest(text), "chat_probe_digest": ids_digest(chat.tolist())}


def test_the_engines_own_ids_settle_whether_ours_are_the_same(tmp_path: Path) -> None:
    with_bos = make_model_folder(tmp_path / "bos", TURNS, begins_with_bos=True)
    digests = probed(ModelTokenizer(with_bos))
    check_probes(ModelTokenizer(with_bos, RenderProfile(**digests)))
    for folder in (make_model_folder(tmp_path / "bare", TURNS), make_model_folder(tmp_path / "other", HEADERS)):
        for name in digests:
            if name == "chat_probe_digest" and folder.name == "bare":
                continue  # its chats begin with the template's own token
            with pytest.raises(UnrenderableError) as caught:
                check_probes(ModelTokenizer(folder, RenderProfile(**{name: digests[name]})))
            assert caught.value.reason == "probe_differs"


def test_a_template_that_reads_the_clock_is_not_probed(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "m", "{{ strftime_now('%f') }}")
    check_probes(ModelTokenizer(folder, RenderProfile(chat_probe_digest="00")))


def test_a_probe_settles_an_unclear_first_token(tmp_path: Path) -> None:
    folder = configure(make_model_folder(tmp_path / "m", CHATML), add_bos_token=True)
    with pytest.raises(UnrenderableError):
        ModelTokenizer(folder).encode_prompt("x", add_special_tokens=True)
    tokenizer = ModelTokenizer(folder)
    ids = tokenizer.encode(PROBE_TEXT, add_special_tokens=True).tolist()
    settled = ModelTokenizer(folder, RenderProfile(text_probe_digest=ids_digest(ids)))
    check_probes(settled)
    assert len(settled.encode_prompt("x", add_special_tokens=True)) == 1
