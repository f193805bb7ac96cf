"""This project's own episodes: ``episodes.jsonl`` with its ``images`` store beside it, checked and copied.

Reading and writing change nothing: ids, places and licences stay those of the first import. ``--images`` names the
store if it lies elsewhere.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

from mage_jax.data import strict_json
from mage_jax.data.adapters.base import Adapter, AdapterError, Context, Item
from mage_jax.data.episode_schema import Episode
from mage_jax.data.episodes import EpisodeError, parse_episode
from mage_jax.data.image_store import ImageStore, ImageStoreError

FORMAT = "episodes"
EPISODES_FILE, IMAGES_FOLDER = "episodes.jsonl", "images"


def convert(item: Item, context: Context) -> Iterator[Episode]:
    """One line to one episode, its pictures copied after hashing them again. Raises AdapterError."""
    place = item.place
    raw = item.content if isinstance(item.content, bytes) else strict_json.dumps(item.content)
    store = ImageStore(context.options.images or pathlib.Path(place.file).parent / IMAGES_FOLDER)
    try:
        episode = parse_episode(raw, source_file=place.file, line=place.line, store=store)
    except EpisodeError as error:
        raise AdapterError(str(error), kind="episode") from error
    for sha256 in sorted(episode.image_hashes()):
        try:
            context.store.put(store.get(sha256))
        except ImageStoreError as error:
            raise place.fail("images", str(error), "image") from error
    yield episode


def files(path: pathlib.Path) -> list[pathlib.Path]:
    """The file, or the episodes file of a folder."""
    return [path / EPISODES_FILE] if path.is_dir() else [path]


ADAPTER = Adapter(name=FORMAT, coord_space="thousand", convert=convert, files=files)
