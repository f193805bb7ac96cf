"""Public data to this project's episodes, as a command::

    python -m mage_jax.data.import_records --format agentnet --in agentnet_ubuntu_5k.jsonl --images shots --out got

writes a folder with ``episodes.jsonl`` (see ``mage_jax.data.episodes``), ``images/`` (an ``ImageStore``) and
``summary.json``. The folder appears when everything is in it, and never half done; an existing one is not touched.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal, get_args

from tqdm import tqdm

from mage_jax.data.adapters import ADAPTERS
from mage_jax.data.adapters.base import Adapter, AdapterError, Context, Item, Place, ReadOptions
from mage_jax.data.adapters.own import EPISODES_FILE, IMAGES_FOLDER
from mage_jax.data.episode_schema import CoordSpace, Episode
from mage_jax.data.episodes import EpisodeError, dump
from mage_jax.data.image_store import ImageStore

SUMMARY_FILE = "summary.json"
MAX_EXAMPLES = 3  # messages kept of each kind of fault


class ImportFailed(Exception):
    """An import that wrote nothing; the text is the reason."""


@dataclasses.dataclass
class Summary:
    """What an import did. ``skipped`` counts records by kind of fault, ``examples`` keeps the first messages of each.

    ``records`` are those looked at, ``episodes`` those written. ``calls`` counts by action, "bash" for commands.
    """

    format: str
    coord_space: str
    records: int = 0
    episodes: int = 0
    turns: int = 0
    unsupervised_turns: int = 0
    images: int = 0
    calls: Counter[str] = dataclasses.field(default_factory=Counter)
    outcomes: Counter[str] = dataclasses.field(default_factory=Counter)
    prompts: Counter[str] = dataclasses.field(default_factory=Counter)
    licences: Counter[str] = dataclasses.field(default_factory=Counter)
    skipped: Counter[str] = dataclasses.field(default_factory=Counter)
    examples: dict[str, list[str]] = dataclasses.field(default_factory=dict)

    def add(self, episode: Episode) -> None:
        self.episodes += 1
        self.turns += len(episode.turns)
        self.unsupervised_turns += sum(not turn.supervised for turn in episode.turns)
        self.outcomes[episode.outcome.kind] += 1
        self.prompts[episode.prompt] += 1
        self.licences[episode.source.licence] += 1
        for turn in episode.turns:
            for call in turn.parsed.calls if turn.parsed else ():
                self.calls[call.arguments.get("action", call.name)] += 1

    def skip(self, error: AdapterError) -> None:
        self.skipped[error.kind] += 1
        examples = self.examples.setdefault(error.kind, [])
        if len(examples) < MAX_EXAMPLES:
            examples.append(str(error))

    def as_json(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: dict(v.most_common()) if isinstance(v, Counter) else v for name, v in values.items()}

    def lines(self) -> list[str]:
        """For people."""
        counts = [(name, getattr(self, name)) for name in ("calls", "outcomes", "prompts", "licences", "skipped")]
        out = [
            f"{self.format}: {self.records} records read, {sum(self.skipped.values())} skipped; wrote {self.episodes} "
            f"episodes, {self.turns} turns ({self.unsupervised_turns} not supervised), {self.images} pictures"
        ]
        out += [f"  {name}: " + ", ".join(f"{k} {n}" for k, n in c.most_common()) for name, c in counts if c]
        return out + [f"  skipped, {kind}: {text}" for kind, texts in self.examples.items() for text in texts]


def import_records(
    source: pathlib.Path,
    out: pathlib.Path,
    *,
    format: str,
    options: ReadOptions,
    limit: int | None = None,
    on_error: Literal["fail", "skip"] = "fail",
    progress: bool = False,
) -> Summary:
    """Imports ``source`` to the new folder ``out``.

    Args:
      source: a file or a folder, as the format has them.
      out: must not exist.
      format: a name of ``ADAPTERS``.
      options: what the files do not say.
      limit: records to look at, in file order; None for all.
      on_error: "fail" stops at the first fault; "skip" leaves the record (a whole one, also if it makes several
        episodes) out and counts it.
      progress: a bar on stderr, by bytes of the record files.

    Raises:
      ImportFailed: ``out`` exists, nothing is to be read, nothing was written, or (with "fail") a record's fault, with
        file, line and field.
    """
    adapter = ADAPTERS[format]
    if out.exists():
        raise ImportFailed(f"--out: {out} exists; name a new folder or delete it")
    files = adapter.files(source)
    missing = [file for file in files if not file.is_file()]
    if not files or missing:
        raise ImportFailed(f"--in: {missing[0] if missing else source}: no file of format {format} is there")
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        summary = _write(adapter, files, temporary, options=options, limit=limit, on_error=on_error, progress=progress)
        if not summary.episodes:
            raise ImportFailed("\n".join(["no record could be imported", *summary.lines()[1:]]))
        os.rename(temporary, out)
    except (AdapterError, EpisodeError, OSError) as error:
        raise ImportFailed(str(error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return summary


def _write(
    adapter: Adapter,
    files: list[pathlib.Path],
    folder: pathlib.Path,
    *,
    options: ReadOptions,
    limit: int | None,
    on_error: str,
    progress: bool,
) -> Summary:
    space = options.coord_space or adapter.coord_space
    context = Context(options, ImageStore(folder / IMAGES_FOLDER), space)
    summary, seen = Summary(adapter.name, space), dict[str, str]()
    pictures: set[str] = set()
    total = sum(file.stat().st_size for file in files)
    with (
        open(folder / EPISODES_FILE, "w", encoding="utf-8", newline="\n") as target,
        tqdm(total=total, unit="B", unit_scale=True, desc=adapter.name, disable=not progress) as bar,
    ):
        for item in _items(adapter, files, summary, on_error):
            if limit is not None and summary.records >= limit:
                break
            summary.records += 1
            bar.update(item.num_bytes)
            try:
                made = [(episode, episode_line(episode, item.place)) for episode in adapter.convert(item, context)]
                _check_ids([episode.episode_id for episode, _ in made], seen, item.place)
            except AdapterError as error:
                if on_error == "fail":
                    raise
                summary.skip(error)
                continue
            for episode, line in made:
                seen[episode.episode_id] = str(item.place)
                target.write(line + "\n")
                summary.add(episode)
                pictures |= episode.image_hashes()
            bar.set_postfix(episodes=summary.episodes, skipped=summary.skipped.total())
    summary.images = len(pictures)
    _drop_orphans(context.store, pictures)
    (folder / SUMMARY_FILE).write_text(json.dumps(summary.as_json(), indent=2) + "\n", encoding="utf-8")
    return summary


def _items(adapter: Adapter, files: list[pathlib.Path], summary: Summary, on_error: str) -> Iterator[Item]:
    for file in files:
        try:
            yield from adapter.read(file)
        except AdapterError as error:  # of the file itself; what follows in it is lost
            if on_error == "fail":
                raise
            summary.skip(error)


def episode_line(episode: Episode, place: Place) -> str:
    """The episode as JSON; a fault that only the schema sees becomes an AdapterError that names the record."""
    try:
        return dump(episode)
    except EpisodeError as error:
        raise place.fail("episode", str(error), "schema") from error


def _check_ids(ids: list[str], seen: dict[str, str], place: Place) -> None:
    for i, episode_id in enumerate(ids):
        if episode_id in seen or episode_id in ids[:i]:
            first = seen.get(episode_id, str(place))
            raise place.fail("id", f"{episode_id!r} is already used by {first}; ids must be unique", "duplicate id")


def _drop_orphans(store: ImageStore, kept: set[str]) -> None:
    """Pictures of records that were skipped after they had been stored."""
    for path in store.root.glob("*/*"):
        if path.name not in kept:
            path.unlink()


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mage_jax.data.import_records", description="Import public data as episodes.")
    parser.add_argument("--format", required=True, choices=sorted(ADAPTERS))
    parser.add_argument("--in", dest="source", required=True, type=pathlib.Path, help="record file, or folder of them")
    parser.add_argument("--out", required=True, type=pathlib.Path, help="folder to write; must not exist")
    parser.add_argument("--limit", type=int, help="look at this many records only")
    parser.add_argument("--on_error", choices=("fail", "skip"), default="fail", help="default: fail at the first fault")
    parser.add_argument("--name", help="name of the data set, prefix of episode ids; default: the format")
    parser.add_argument("--licence", default="unknown", help="of the data set, unless records state their own")
    parser.add_argument(
        "--coord_space", choices=get_args(CoordSpace), help="of the source's coordinates; default: the format's usual"
    )
    parser.add_argument("--images", type=pathlib.Path, help="folder that picture paths start from; default: the file's")
    parser.add_argument("--tasks", type=pathlib.Path, help="OSWorld task definitions, <domain>/<id>.json")
    parser.add_argument(
        "--scroll_per_click",
        type=float,
        default=ReadOptions.scroll_per_click,
        help="units of 1/999 screen that one wheel click scrolls; default: %(default)s",
    )
    parser.add_argument("--unknown_fields", choices=("fail", "ignore"), default="fail", help="default: fail")
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit code: 0, or 1 with the reason on stderr."""
    args = make_parser().parse_args(argv)
    try:
        if args.limit is not None and args.limit < 1:
            raise ImportFailed(f"--limit: must be at least 1, got {args.limit}")
        options = ReadOptions(
            name=args.name or args.format,
            licence=args.licence,
            coord_space=args.coord_space,
            images=args.images,
            tasks=args.tasks,
            scroll_per_click=args.scroll_per_click,
            unknown_fields=args.unknown_fields,
        )
        summary = import_records(
            args.source,
            args.out,
            format=args.format,
            options=options,
            limit=args.limit,
            on_error=args.on_error,
            progress=True,
        )
    except (ImportFailed, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n".join(summary.lines()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
