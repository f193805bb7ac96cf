"""Tokenizer wrapper and the shipped toy tokenizer."""

import json
import pickle
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mage_jax.agent import toy_tokenizer
from mage_jax.agent.tokenizer import ASSETS, Tokenizer, TokenizerError

TOY = Tokenizer.load("toy")
TURN = (
    "<think>\nI see the window.\n</think>\nAction: Click the red button.\n<tool_call>\n"
    '{"name": "computer_use", "arguments": {"action": "click", "coordinate": [512, 300]}}\n</tool_call>'
)


def test_shipped_file_is_what_build_makes():
    assert (ASSETS / "toy_tokenizer.json").read_bytes() == toy_tokenizer.build().encode()


def test_toy_has_512_entries_and_all_control_tokens():
    assert TOY.vocab_size == 512
    ids = toy_tokenizer.special_ids()
    assert (ids.endoftext, ids.im_start, ids.im_end, ids.image_pad) == (499, 500, 501, 504)
    for token in ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"):
        assert len(TOY.encode_text(token)) == 1


def test_tool_call_is_short_and_digits_are_single():
    ids = TOY.encode_text(TURN)
    assert TOY.decode(ids) == TURN
    assert len(ids) <= 50
    assert [TOY.decode([i]) for i in TOY.encode_text("1234")] == list("1234")


@given(st.text())
def test_round_trip_of_any_text(text):
    assert TOY.decode(TOY.encode_text(text)) == text


@given(st.lists(st.sampled_from([*toy_tokenizer.CONTROL_TOKENS, "<|", "|>", "a", " ", "\n", "é"])).map("".join))
def test_text_never_yields_a_control_id(text):
    special = {TOY.special(token) for token, is_special in toy_tokenizer.CONTROL_TOKENS.items() if is_special}
    ids = TOY.encode_text(text)
    assert not special & set(ids)
    assert TOY.decode(ids) == text


def test_decode_agrees_with_the_library():
    text = "héllo 日本 \N{GRINNING FACE}"
    ids = [*TOY.encode_text(text), TOY.special("<|im_end|>"), 200]
    assert TOY.decode(ids) == TOY._inner.decode(ids, skip_special_tokens=False)


@given(st.lists(st.integers(0, 600)))
def test_stream_joins_up_to_decode_and_never_splits_a_character(ids):
    stream = TOY.stream()
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) + stream.flush() == TOY.decode(ids)


def test_stream_waits_for_whole_characters():
    stream = TOY.stream()
    pieces = [stream.push(i) for i in TOY.encode_text("日")]
    assert pieces == ["", "", "日"]
    stream.push(TOY.encode_text("日")[0])
    assert stream.flush() == "\ufffd"


def test_ids_outside_the_vocabulary_are_visible():
    assert TOY.decode([TOY.encode_text("a")[0], 9999]) == "a\ufffd"


def test_save_is_exact_and_loads_from_file_and_folder(tmp_path):
    saved = TOY.save(tmp_path / "folder")
    assert saved.read_bytes() == (ASSETS / "toy_tokenizer.json").read_bytes()
    assert list(saved.parent.iterdir()) == [saved]
    for path in (saved, saved.parent):
        assert Tokenizer.load(path).encode_text(TURN) == TOY.encode_text(TURN)


def test_pickle_keeps_the_two_doors_apart():
    again = pickle.loads(pickle.dumps(TOY))
    assert again.encode_text("<|im_end|>") == TOY.encode_text("<|im_end|>") != [TOY.special_ids.im_end]


def test_qwen_like_normalizer_is_respected(tmp_path):
    contents = json.loads(toy_tokenizer.build())
    contents["normalizer"] = {"type": "NFC"}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(contents))
    tokenizer = Tokenizer.load(path)
    decomposed = unicodedata.normalize("NFD", "é")
    assert tokenizer.decode(tokenizer.encode_text(decomposed)) == "é"


@pytest.mark.parametrize("trim", [True, False])
def test_starts_are_those_of_the_given_text_whatever_the_file_says(tmp_path, trim):
    contents = json.loads(toy_tokenizer.build())
    contents["normalizer"] = {"type": "NFC"}
    contents["post_processor"] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": trim,
        "use_regex": False,
    }
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(contents))
    tokenizer = Tokenizer.load(path)
    text = unicodedata.normalize("NFD", "é日 ") + "\n</think>\n\nAction: x"
    ids, starts = tokenizer.encode_with_starts(text)
    assert ids == tokenizer.encode_text(text) and starts == sorted(starts) and starts[0] == 0
    close = ids.index(tokenizer.encode_text("</think>")[0])
    assert starts[close] == text.index("</think>") and starts[close + 1] == text.index("\n\nAction")
    # Each ASCII token starts where its own text stands, whitespace included.
    for i, start in zip(ids, starts, strict=True):
        piece = tokenizer.decode([i])
        assert not piece.isascii() or text.startswith(piece, start)


def test_saved_truncation_is_not_applied(tmp_path):
    contents = json.loads(toy_tokenizer.build())
    contents["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(contents))
    assert len(Tokenizer.load(path).encode_text("abcdefgh")) > 2


def test_missing_control_token_is_named(tmp_path):
    contents = json.loads(toy_tokenizer.build())
    contents["added_tokens"] = [t for t in contents["added_tokens"] if t["content"] != "<|video_pad|>"]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(contents))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json.*<\|video_pad\|>"):
        Tokenizer.load(path)
    with pytest.raises(TokenizerError, match=r"<\|nope\|>"):
        TOY.special("<|nope|>")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"decoder": null, "model": {}}'])
def test_not_a_tokenizer_file(tmp_path, text):
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.load(path)


def test_not_byte_level(tmp_path):
    contents = json.loads(toy_tokenizer.build())
    contents["decoder"] = {"type": "BPEDecoder", "suffix": ""}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(contents))
    with pytest.raises(TokenizerError, match="ByteLevel"):
        Tokenizer.load(path)


def test_missing_file_and_empty_folder_and_surrogate(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(TokenizerError, match="give 'toy'"):
            Tokenizer.load(path)
    with pytest.raises(TokenizerError, match="surrogate at character 1"):
        TOY.encode_text("a\ud800")
