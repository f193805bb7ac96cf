"""The toy tokenizer: 512 tokens with Qwen's control tokens and split rule, built from a corpus in this file.

``build`` is deterministic and its output is shipped as ``assets/toy_tokenizer.json`` (write it again with
``python -m mage_jax.agent.toy_tokenizer``). It is byte-level, so any text round-trips, and its merges are learned on
the agent's own turns, so that the JSON of a tool call stays short.
"""

from __future__ import annotations

import collections
import itertools
import json

from tokenizers import Regex, pre_tokenizers

from mage_jax.agent import tokenizer as tokenizer_lib

VOCAB_SIZE = 512
# Qwen2's split rule: digits one by one, words with one leading space or sign, newlines in runs.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# In Qwen3's order. True: special, so text never matches it; False: an added token that text does match.
CONTROL_TOKENS = {
    "<|endoftext|>": True,
    "<|im_start|>": True,
    "<|im_end|>": True,
    "<|vision_start|>": True,
    "<|vision_end|>": True,
    "<|image_pad|>": True,
    "<|video_pad|>": True,
    "<tool_call>": False,
    "</tool_call>": False,
    "<tool_response>": False,
    "</tool_response>": False,
    "<think>": False,
    "</think>": False,
}
# (weight, text): what the toy model reads and writes most should cost the fewest tokens.
_CORPUS = (
    (40, '\n{"name": "computer_use", "arguments": {"action": "click", "coordinate": [512, 300]}}\n'),
    (12, '\n{"name": "computer_use", "arguments": {"action": "type", "text": "hello"}}\n'),
    (8, '\n{"name": "computer_use", "arguments": {"action": "keypress", "keys": ["ctrl", "enter", "tab"]}}\n'),
    (8, '\n{"name": "computer_use", "arguments": {"action": "scroll", "scroll_x": 0, "scroll_y": -500}}\n'),
    (8, '\n{"name": "computer_use", "arguments": {"action": "drag", "start": [1, 2], "end": [3, 4]}}\n'),
    (8, '\n{"name": "computer_use", "arguments": {"action": "terminate", "status": "success"}}\n'),
    (6, '\n{"name": "computer_use", "arguments": {"action": "double_click", "coordinate": [7, 8]}}\n'),
    (4, '\n{"name": "computer_use", "arguments": {"action": "triple_click", "coordinate": [7, 8]}}\n'),
    (4, '\n{"name": "computer_use", "arguments": {"action": "click", "button": "right", "coordinate": [9, 9]}}\n'),
    (4, '\n{"name": "computer_use", "arguments": {"action": "move", "coordinate": [9, 9]}}\n'),
    (4, '\n{"name": "computer_use", "arguments": {"action": "wait", "time": 2}}\n'),
    (4, '\n{"name": "computer_use", "arguments": {"action": "screenshot"}}\n'),
    (4, '\n{"name": "bash", "arguments": {"command": "ls -la /tmp_workspace"}}\n'),
    (3, '{"status": "failure", "msg_to_user": "done"} "button": "left" "middle"'),
    (20, "\nAction: Click the button.\n"),
    (10, "\nAction: Type the text in the box.\n"),
    (10, "system\nYou are a helpful assistant."),
    (20, "user\nTask:"),
    (20, "assistant\n"),
    (8, "\nThe task asks me to click on the red button. I see the window on the screen and it is open.\n"),
    (6, "Previous actions:\nStep 1: Click the left one.\nStep 2: Open the file menu.\n"),
    (6, "Describe. What is in this image? The image shows a blue square, a green circle and a red button. yes no"),
    (4, "The next step is to select the item in the list, then press the key to close the page and save the file."),
)


def _count_words() -> dict[tuple[str, ...], int]:
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    counts: collections.Counter[tuple[str, ...]] = collections.Counter()
    for weight, text in _CORPUS:
        for word, _ in split.pre_tokenize_str(text):
            counts[tuple(word)] += weight
    return dict(counts)


def _merge(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    merged: list[str] = []
    i = 0
    while i < len(word):
        if word[i : i + 2] == pair:
            merged.append(word[i] + word[i + 1])
            i += 2
        else:
            merged.append(word[i])
            i += 1
    return tuple(merged)


def _learn_merges(number: int) -> list[tuple[str, str]]:
    """Byte-pair encoding: merge the most frequent pair, ties broken by the pair's own text, ``number`` times."""
    words = _count_words()
    merges: list[tuple[str, str]] = []
    while len(merges) < number:
        pairs: collections.Counter[tuple[str, str]] = collections.Counter()
        for word, count in words.items():
            for pair in itertools.pairwise(word):
                pairs[pair] += count
        if not pairs:
            break
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        words = {_merge(word, best): count for word, count in words.items()}
    return merges


def build() -> str:
    """The text of the toy tokenizer.json: 256 bytes, then merges, then the control tokens, 512 entries in all."""
    tokens = [tokenizer_lib.byte_alphabet()[byte] for byte in range(256)]
    merges = _learn_merges(VOCAB_SIZE - len(tokens) - len(CONTROL_TOKENS))
    tokens += [first + second for first, second in merges]
    added = [
        {
            "id": len(tokens) + i,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": special,
        }
        for i, (content, special) in enumerate(CONTROL_TOKENS.items())
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    contents = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,  # Qwen has NFC here; without it every text round-trips
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False},
                byte_level,
            ],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [list(pair) for pair in merges],
        },
    }
    return json.dumps(contents, ensure_ascii=False, indent=1) + "\n"


def special_ids() -> tokenizer_lib.SpecialIds:
    """Control ids of the shipped toy tokenizer, for a toy ``ModelConfig`` (bos is endoftext, eos is im_end)."""
    return tokenizer_lib.Tokenizer.load("toy").special_ids


if __name__ == "__main__":
    (tokenizer_lib.ASSETS / "toy_tokenizer.json").write_text(build(), encoding="utf-8", newline="")
