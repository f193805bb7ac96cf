"""Text to token ids and back, with control tokens kept apart from text.

A thin wrapper around the ``tokenizers`` library for byte-level BPE files (Qwen's, and the toy one shipped here). Two
doors on purpose: ``encode_text`` never yields a control id, whatever a user or a web page writes, and ``special`` is
the only way to get one. Tokens that the file marks as *non-special* additions (``<think>``, ``<tool_call>`` in Qwen3)
are ordinary text: a model writes them, so they are matched wherever they appear.
"""

from __future__ import annotations

import codecs
import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Iterable

import tokenizers

ASSETS = pathlib.Path(__file__).parent / "assets"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TokenizerError(ValueError):
    """A tokenizer file is missing, unreadable or of the wrong kind, or a text or token cannot be encoded."""


@dataclasses.dataclass(frozen=True)
class SpecialIds:
    """Ids of the control tokens that prompts are built from."""

    endoftext: int
    im_start: int
    im_end: int
    vision_start: int
    vision_end: int
    image_pad: int
    video_pad: int


def byte_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-in for each of the 256 byte values, used in the token strings of byte-level BPE files."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    alphabet = {byte: chr(byte) for byte in printable}
    rest = (byte for byte in range(256) if byte not in alphabet)
    return alphabet | {byte: chr(256 + i) for i, byte in enumerate(rest)}


_CHAR_TO_BYTE = {char: byte for byte, char in byte_alphabet().items()}


def _decoder_types(decoder: dict | None) -> set[str]:
    if not isinstance(decoder, dict):
        return set()
    return {str(decoder.get("type"))}.union(*(_decoder_types(d) for d in decoder.get("decoders", ())))


class Tokenizer:
    """A byte-level BPE tokenizer. Make one with ``Tokenizer.load``; immutable, picklable, safe to share by threads."""

    def __init__(self, json_text: str, *, source: str = "<string>"):
        """Builds from the text of a tokenizer.json; ``source`` names it in errors."""
        self._json_text = json_text
        self.source = source
        try:
            decoder = json.loads(json_text).get("decoder")
            self._inner = tokenizers.Tokenizer.from_str(json_text)
        except Exception as error:  # the library raises bare Exception on a malformed file
            raise TokenizerError(f"{source}: is not a tokenizer.json ({error})") from error
        if "ByteLevel" not in _decoder_types(decoder):
            raise TokenizerError(f"{source}: field 'decoder' must be ByteLevel (Qwen's kind), got {decoder!r}")
        # The library's name is misleading: True means that special tokens found in *text* are encoded as text.
        self._inner.encode_special_tokens = True
        # Truncation or padding saved in the file would silently cut or lengthen samples.
        self._inner.no_truncation()
        self._inner.no_padding()
        # A byte-level post-processor only trims offsets (templates do not run without special tokens); whitespace must
        # keep its own, or ``encode_with_starts`` would give it to the token behind.
        self._inner.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
        added = self._inner.get_added_tokens_decoder()
        self._special = {token.content: i for i, token in added.items() if token.special}
        self._bytes = {i: token.content.encode() for i, token in added.items()}
        for token, i in self._inner.get_vocab(with_added_tokens=False).items():
            if i not in self._bytes:
                self._bytes[i] = self._token_to_bytes(token)
        self._vocab_size = max(self._bytes) + 1
        names = {f.name: f"<|{f.name}|>" for f in dataclasses.fields(SpecialIds)}
        self.special_ids = SpecialIds(**{field: self.special(name) for field, name in names.items()})

    def _token_to_bytes(self, token: str) -> bytes:
        try:
            return bytes(_CHAR_TO_BYTE[char] for char in token)
        except KeyError as error:
            raise TokenizerError(
                f"{self.source}: token {token!r} is not byte-level (character {error.args[0]!r})"
            ) from None

    @classmethod
    def load(cls, path_or_name: str | os.PathLike[str]) -> Tokenizer:
        """Loads "toy" (the shipped one), a tokenizer.json, or a folder that holds one.

        Raises:
          TokenizerError: nothing there, unreadable, not byte-level BPE, or a control token is missing (named).
        """
        name = os.fspath(path_or_name)
        path = ASSETS / "toy_tokenizer.json" if name == "toy" else pathlib.Path(name)
        if path.is_dir():
            path = path / "tokenizer.json"
        try:
            text = path.read_bytes().decode("utf-8")  # bytes: newlines stay as they are, so that save is exact
        except (OSError, ValueError) as error:
            raise TokenizerError(
                f"{path}: cannot be read ({error}); give 'toy', a tokenizer.json, or a folder holding one"
            ) from error
        return cls(text, source=str(path))

    def save(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Writes the tokenizer.json unchanged, atomically, to a ``.json`` path or into a folder; returns the file."""
        target = pathlib.Path(path)
        if target.suffix != ".json":
            target = target / "tokenizer.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        temporary.write_bytes(self._json_text.encode())
        os.replace(temporary, target)
        return target

    def __reduce__(self):
        return _from_json, (self._json_text, self.source)

    @property
    def fingerprint(self) -> str:
        """Digest of the file's text: two tokenizers with the same one encode alike."""
        return hashlib.blake2b(self._json_text.encode(), digest_size=16).hexdigest()

    @property
    def vocab_size(self) -> int:
        """One more than the largest id. A model's embedding may be padded beyond it (Qwen3: 151,669 of 151,936)."""
        return self._vocab_size

    def encode_text(self, text: str) -> list[int]:
        """Ids of ``text``. Control tokens written in it become plain characters.

        Raises:
          TokenizerError: the text holds a lone surrogate, which UTF-8 cannot express.
        """
        return self._encode(text).ids

    def encode_with_starts(self, text: str) -> tuple[list[int], list[int]]:
        """As ``encode_text``, and for each token the offset in ``text`` of its first character (never decreasing).

        The tokens of a character that takes several bytes all have its offset.
        """
        encoding = self._encode(text)
        return encoding.ids, [start for start, _ in encoding.offsets]

    def _encode(self, text: str) -> tokenizers.Encoding:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(f"text holds a lone surrogate at character {error.start}") from error
        return self._inner.encode(text, add_special_tokens=False)

    def special(self, token: str) -> int:
        """Id of a control token such as ``<|im_start|>``; ``TokenizerError`` names it if the file lacks it."""
        try:
            return self._special[token]
        except KeyError:
            raise TokenizerError(
                f"{self.source}: lacks the special token {token!r}; a Qwen2 or Qwen3 vision tokenizer has it"
            ) from None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one id stands for; an id outside the vocabulary stands for U+FFFD.

        Embeddings are padded beyond the vocabulary, so an untrained model can emit such ids: visible, not fatal.
        """
        return self._bytes.get(int(token_id), REPLACEMENT.encode())

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ``ids``, control tokens included. Bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def stream(self) -> StreamDecoder:
        """A fresh incremental decoder."""
        return StreamDecoder(self)


def _from_json(json_text: str, source: str) -> Tokenizer:
    return Tokenizer(json_text, source=source)


class StreamDecoder:
    """Decodes ids one at a time and never emits half a character: the pieces join up to ``Tokenizer.decode``."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The characters that this id completes; empty while a character is unfinished."""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """What is left at the end of a generation: U+FFFD if it stopped inside a character, else empty."""
        return self._utf8.decode(b"", final=True)
