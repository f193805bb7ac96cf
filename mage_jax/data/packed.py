"""A folder of packed rows: ArrayRecord shards and ``manifest.json``, written by ``pack``, read by the loader.

One record is one row, in the order of the batches, so that rows balanced within a batch stay together::

    8 bytes  length of the header, little-endian
    header   JSON: samples (id, where, number of tokens, indices into images), images (name, bytes, grid)
    tokens   int32 of all samples, then their loss weights as float32
    images   the encoded files, each distinct content once

Pixels are not stored: a row's patches are some 100 MB, its screenshots as files a few. Reading renders nothing, reads
no image header and packs nothing; it decodes pictures as the online loader does.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import struct
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np

from mage_jax.data.image import ImageRef
from mage_jax.data.samples import PlannedImage, SamplePlan

MANIFEST = "manifest.json"
VERSION = 1
_LENGTH = struct.Struct("<q")


class PackedError(ValueError):
    """A folder of packed rows is incomplete, damaged, or was packed with other settings; the setting is named."""


def encode_row(row: Sequence[SamplePlan]) -> bytes:
    """A row as one record; image files are read, and each distinct content is stored once."""
    images: dict[bytes, int] = {}
    entries, contents, samples = [], [], []
    seen: dict[str, int] = {}  # a path is read once
    for planned in row:
        shown = []
        for image in planned.images:
            if image.key not in seen:
                content = image.ref.encoded
                if content is None:
                    content = pathlib.Path(image.ref.path).read_bytes()
                digest = hashlib.blake2b(content, digest_size=16).digest()
                if digest not in images:
                    images[digest] = len(entries)
                    entries.append({"name": image.ref.path, "bytes": len(content), "grid": list(image.grid)})
                    contents.append(content)
                seen[image.key] = images[digest]
            shown.append(seen[image.key])
        samples.append(
            {"id": planned.sample_id, "where": planned.where, "tokens": len(planned.tokens), "images": shown}
        )
    header = json.dumps({"samples": samples, "images": entries}, separators=(",", ":")).encode()
    tokens = [np.asarray(planned.tokens, "<i4").tobytes() for planned in row]
    weights = [np.asarray(planned.weights, "<f4").tobytes() for planned in row]
    return b"".join((_LENGTH.pack(len(header)), header, *tokens, *weights, *contents))


def decode_row(record: bytes) -> list[SamplePlan]:
    """Inverse of ``encode_row``; images come as encoded bytes."""
    (length,) = _LENGTH.unpack_from(record)
    header = json.loads(record[_LENGTH.size : _LENGTH.size + length])
    at = _LENGTH.size + length
    total = sum(sample["tokens"] for sample in header["samples"])
    tokens = np.frombuffer(record, "<i4", total, at)
    weights = np.frombuffer(record, "<f4", total, at + 4 * total)
    at += 8 * total
    images = []
    for entry in header["images"]:
        ref = ImageRef(entry["name"], encoded=record[at : at + entry["bytes"]])
        images.append(PlannedImage(ref, tuple(entry["grid"])))
        at += entry["bytes"]
    row, first = [], 0
    for sample in header["samples"]:
        inside = slice(first, first + sample["tokens"])
        shown = tuple(images[index] for index in sample["images"])
        row.append(SamplePlan(sample["id"], sample["where"], tokens[inside], weights[inside], shown))
        first = inside.stop
    return row


def write_json(path: pathlib.Path, value: Any) -> None:
    """Atomically: a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


@dataclasses.dataclass(frozen=True)
class PackedFolder:
    """A complete folder. ``settings`` are those of packing, ``rows`` rows in all, ``fingerprint`` of their bytes."""

    path: pathlib.Path
    settings: dict[str, Any]
    shards: tuple[str, ...]
    rows: int
    samples: int
    tokens: int
    fingerprint: str

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> PackedFolder:
        """Raises ``PackedError`` if the folder is not complete."""
        folder = pathlib.Path(path)
        try:
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise PackedError(
                f"DataConfig.packed: {folder} has no {MANIFEST}; run mage_jax.data.pack to its end"
            ) from None
        except (OSError, ValueError) as error:
            raise PackedError(f"DataConfig.packed: {folder / MANIFEST} cannot be read ({error})") from error
        if manifest.get("version") != VERSION:
            raise PackedError(
                f"DataConfig.packed: {folder} has version {manifest.get('version')!r}, this code reads {VERSION}"
            )
        files = tuple(str(folder / shard["file"]) for shard in manifest["shards"])
        for file in files:
            if not os.path.isfile(file):
                raise PackedError(f"DataConfig.packed: shard {file} is missing; copy the whole folder, or pack again")
        numbers = {name: manifest[name] for name in ("rows", "samples", "tokens", "fingerprint")}
        return cls(folder, manifest["settings"], files, **numbers)

    def check(self, wanted: dict[str, Any]) -> None:
        """Raises ``PackedError`` if a wanted setting is not the one that was packed with."""
        for name, value in wanted.items():
            if self.settings.get(name) != value:
                raise PackedError(
                    f"DataConfig.packed: {self.path} was packed with {name} {self.settings.get(name)!r}, "
                    f"this config has {value!r}; use the same, or pack again"
                )


class PackedBatches(Sequence[list[list[SamplePlan]]]):
    """Random access to a host's rows of each batch: ``first`` to ``first + count`` of every ``rows``. Picklable.

    The last batch may have fewer rows.
    """

    def __init__(self, folder: PackedFolder, *, rows: int, first: int, count: int):
        self._source = grain.sources.ArrayRecordDataSource(list(folder.shards))
        self._total, self._rows, self._first, self._count = folder.rows, rows, first, count
        if len(self._source) != folder.rows:
            raise PackedError(
                f"DataConfig.packed: {folder.path} holds {len(self._source)} rows, its manifest says {folder.rows}"
            )

    def __len__(self) -> int:
        return -(-self._total // self._rows)

    def __getitem__(self, index: int) -> list[list[SamplePlan]]:
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        begin = index * self._rows + self._first
        end = min(begin + self._count, (index + 1) * self._rows, self._total)
        return [decode_row(self._source[row]) for row in range(begin, end)]
