"""Packs one epoch of a config's records to a folder that ``DataConfig.packed`` reads. As a command::

    python -m mage_jax.data.pack --config=FILE.py[:variant] --out DIR [--config.data.FIELD=VALUE ...]

The rows are those of the online loader with ``epochs=1`` and no workers. Shards are written one after another, each
renamed into place when it is whole; beside them ``progress.json`` keeps the state of the iterator after the last one.
The same command continues after an interruption and ends with the same bytes; ``manifest.json`` comes last and makes
the folder complete.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags
from array_record.python import array_record_module

from mage_jax.agent.tokenizer import Tokenizer, TokenizerError
from mage_jax.config import ConfigError, TrainConfig
from mage_jax.config_flags import UsageError, parse_command_line, run_main
from mage_jax.data.image import ImageError
from mage_jax.data.loader import LoaderError, check_settings
from mage_jax.data.mixture import open_sources
from mage_jax.data.packed import MANIFEST, VERSION, PackedError, PackedFolder, encode_row, write_json
from mage_jax.data.packing import PackingError
from mage_jax.data.parse import RecordError
from mage_jax.data.rows import Planner, content_identity, planned_batches, row_shape

USAGE = """usage: python -m mage_jax.data.pack --config=FILE.py[:variant] --out=DIR [--config.data.FIELD=VALUE ...]

Packs one epoch of the config's records to a folder of ready rows, for DataConfig.packed. Run the same
command again to continue after a stop.

  --config=FILE.py[:variant]  config file; its get_config(variant) returns a TrainConfig
  --config.FIELD=VALUE        overrides a field
  --out=DIR                   the folder to write
  --batches_per_shard=N       batches in a shard, which is what an interruption can cost (default: 4)
  --help                      this text
"""
PROGRESS = "progress.json"
# Rows are read one at a time, and the images in them are compressed already.
_WRITER_OPTIONS = "group_size:1,uncompressed"
_FIRST = {"shards": [], "iterator": None, "rows": 0, "samples": 0, "tokens": 0}


def pack(
    config: TrainConfig,
    out: str | os.PathLike[str],
    *,
    batches_per_shard: int = 4,
    say: Callable[[str], None] = lambda line: None,
) -> PackedFolder:
    """Writes, or continues, the folder ``out``; returns at once if it is complete.

    Args:
      config: its ``data`` (records or mixture, packer, row shape), geometry and seed. ``epochs`` and ``workers`` do not
        matter: a folder holds one epoch.
      out: made if absent.
      batches_per_shard: a shard is what an interruption can cost.
      say: receives a line for each shard.

    Raises:
      PackedError: the folder holds something else, or was begun with other settings.
      ConfigError, LoaderError, RecordError, PackingError, TokenizerError: the config or a record cannot be packed.
    """
    folder, data, seed = pathlib.Path(out), config.data, config.seed % 2**32
    if batches_per_shard < 1:
        raise PackedError(f"batches_per_shard: must be positive, got {batches_per_shard}")
    if not data.tokenizer:
        raise ConfigError('config.data.tokenizer: is empty; name the checkpoint\'s own, or "toy"')
    tokenizer = Tokenizer.load(data.tokenizer)
    check_settings(
        data,
        vision=config.model.vision,
        tokenizer=tokenizer,
        image_token_id=config.model.image_token_id,
        host=0,
        hosts=1,
    )
    sources = open_sources(data, evaluation=False)
    for source in sources:
        if not len(source.records):
            raise LoaderError(f"{source.field}: holds no records ({', '.join(source.records.paths) or 'no files'})")
    shuffle_seed = seed if data.shuffle else None
    settings = content_identity(
        data, sources, tokenizer=tokenizer, image=data.image, shuffle_seed=shuffle_seed, seed=seed, epochs=1
    )
    settings = json.loads(json.dumps({**settings, "batches_per_shard": batches_per_shard}))  # as it is read back
    progress = _begin(folder, settings)
    if progress is None:
        say(f"{folder} is complete")
        return PackedFolder.open(folder)

    shape = row_shape(data, vision=config.model.vision, image_token_id=config.model.image_token_id)
    iterator = iter(
        planned_batches(
            data,
            sources,
            Planner(tokenizer, data.image, config.model.vision, shape),
            shuffle_seed=shuffle_seed,
            seed=seed,
            epochs=1,
            workers=0,
            rows=data.rows,
        )
    )
    try:
        if progress["iterator"] is not None:
            iterator.set_state(progress["iterator"])
        while batches := list(itertools.islice(iterator, batches_per_shard)):
            rows = [row for batch in batches for row in batch]
            name = f"rows-{len(progress['shards']):05d}.array_record"
            digest = _write_shard(folder / name, rows)
            plans = [planned for row in rows for planned in row]
            progress["shards"].append({"file": name, "rows": len(rows), "blake2b": digest})
            progress["rows"] += len(rows)
            progress["samples"] += len(plans)
            progress["tokens"] += sum(len(planned.tokens) for planned in plans)
            progress["iterator"] = iterator.get_state()
            write_json(folder / PROGRESS, {"settings": settings, **progress})
            used = progress["tokens"] / (progress["rows"] * shape.tokens)
            say(f"{name}: {progress['rows']} rows, {progress['samples']} samples, {used:.2%} of the tokens used")
    finally:
        iterator.close()
    fingerprint = hashlib.blake2b("".join(s["blake2b"] for s in progress["shards"]).encode(), digest_size=16)
    numbers = {key: progress[key] for key in ("rows", "samples", "tokens", "shards")}
    manifest = {"version": VERSION, "settings": settings, **numbers, "fingerprint": fingerprint.hexdigest()}
    write_json(folder / MANIFEST, manifest)
    (folder / PROGRESS).unlink()
    return PackedFolder.open(folder)


def _begin(folder: pathlib.Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Where to go on, leftovers removed; None if the folder is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    manifest, progress = folder / MANIFEST, folder / PROGRESS
    found = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    state = dict(_FIRST, shards=[])
    if found & {MANIFEST, PROGRESS}:
        saved = json.loads((manifest if MANIFEST in found else progress).read_text(encoding="utf-8"))
        for name in {**saved["settings"], **settings}:
            old, new = saved["settings"].get(name), settings.get(name)
            if old != new:
                raise PackedError(f"{folder}: was begun with {name} {old!r}, now it is {new!r}; choose another folder")
        if MANIFEST in found:
            progress.unlink(missing_ok=True)
            return None
        state = {key: saved[key] for key in _FIRST}
    elif any(not name.startswith("rows-") for name in found):
        raise PackedError(f"{folder}: holds other files ({', '.join(sorted(found)[:5])}); choose a new folder")
    known = {shard["file"] for shard in state["shards"]}
    if missing := known - found:
        raise PackedError(f"{folder}: shard {min(missing)} is gone; remove the folder and pack again")
    for path in folder.glob("*rows-*.array_record*"):  # half written, or whole but not in the progress file
        if path.name not in known:
            path.unlink()
    return state


def _write_shard(path: pathlib.Path, rows: Sequence[Sequence[Any]]) -> str:
    """Writes beside the target, then renames; returns a digest of the records."""
    temporary = path.with_name(f".{path.name}.tmp")
    digest = hashlib.blake2b(digest_size=16)
    writer = array_record_module.ArrayRecordWriter(str(temporary), _WRITER_OPTIONS)
    try:
        for row in rows:
            try:
                record = encode_row(row)
            except OSError as error:
                where = ", ".join(planned.where for planned in row)
                raise ImageError(f"{error.filename}: cannot be read ({error.strerror}); shown by {where}") from error
            digest.update(record)
            writer.write(record)
    finally:
        writer.close()
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return digest.hexdigest()


def define_flags(flag_values: flags.FlagValues) -> None:
    flags.DEFINE_string("out", "", "the folder to write", flag_values=flag_values)
    flags.DEFINE_integer(
        "batches_per_shard", 4, "what an interruption can cost", flag_values=flag_values, lower_bound=1
    )


def main(argv: Sequence[str]) -> int:
    """The command; returns the exit code: 0, or 1 with one line on stderr (2 from ``run_main``: wrong command line)."""
    config, options = parse_command_line(argv, cls=TrainConfig, usage=USAGE, define=define_flags)
    if not options.out:
        raise UsageError("--out=DIR is missing; --help explains")
    try:
        done = pack(
            config, options.out, batches_per_shard=options.batches_per_shard, say=lambda line: print(line, flush=True)
        )
    except (ImageError, LoaderError, OSError, PackedError, PackingError, RecordError, TokenizerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{done.path}: {done.rows} rows, {done.samples} samples in {len(done.shards)} shards")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
