"""Tasks and episodes in files: the one form that importers, environments, RL and evaluation share.

A file is JSONL, one struct of ``mage_jax.data.episode_schema`` a line, every field written. Reading is strict: an
unknown, missing or mistyped field, or a broken invariant, is an ``EpisodeError`` that reads
``file:line: dotted.field: reason``. Pictures stand in an ``ImageStore`` by sha256.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

from mage_jax.agent.calls import ToolCall
from mage_jax.agent.errors import ProtocolError
from mage_jax.data import strict_json
from mage_jax.data.episode_schema import EXCLUDED, FORMAT_VERSION, Episode, Observation, Sampled, TaskSpec, Turn
from mage_jax.data.image_store import ImageStore, is_sha256
from mage_jax.data.parse import RecordError
from mage_jax.data.strict_json import Fail

_MAX_INT32 = 2**31 - 1  # rows hold int32


class EpisodeError(RecordError):
    """A task or an episode cannot be used. The text is ``file:line: field: reason``."""


def parse_task(raw: bytes | str, *, source_file: str | os.PathLike[str], line: int) -> TaskSpec:
    """One line to a task.

    Raises:
      EpisodeError: anything wrong; file, line and field are named.
    """
    task, fail = _parse(TaskSpec, raw, source_file, line)
    check_task(task, fail=fail)
    return task


def parse_episode(
    raw: bytes | str,
    *,
    source_file: str | os.PathLike[str],
    line: int,
    store: ImageStore | None = None,
    image_pad_id: int | None = None,
) -> Episode:
    """One line to an episode.

    Args:
      raw: the line.
      source_file, line: for errors.
      store: when given, every picture must be in it (its bytes are not read).
      image_pad_id: when given, the prompt's image_pad tokens must be exactly those of the images' token spans.

    Raises:
      EpisodeError: anything wrong; file, line and field are named.
    """
    episode, fail = _parse(Episode, raw, source_file, line)
    check_episode(episode, fail=fail, store=store, image_pad_id=image_pad_id)
    return episode


def dump(value: TaskSpec | Episode) -> str:
    """One line of JSON, without the newline, that was read back and found equal to ``value``.

    Raises:
      EpisodeError: a struct that could not be read again (wrong type in a field, broken invariant, not finite).
    """
    name = f"<{type(value).__name__} {value.task_id if isinstance(value, TaskSpec) else value.episode_id}>"
    try:
        line = strict_json.dumps(strict_json.encode(value))
    except (TypeError, ValueError) as error:
        raise EpisodeError(f"{name}:1: line: cannot be written as JSON ({error})") from error
    parse = parse_task if isinstance(value, TaskSpec) else parse_episode
    if parse(line, source_file=name, line=1) != value:
        raise EpisodeError(f"{name}:1: line: holds values that JSON changes; use tuples in structs, lists in objects")
    return line


def read_episodes(path: str | os.PathLike[str], *, store: ImageStore | None = None) -> Iterator[Episode]:
    """Episodes of a JSONL file, one at a time. Raises EpisodeError, also for a file that cannot be read."""
    try:
        with open(path, "rb") as file:
            for number, raw in enumerate(file, start=1):
                yield parse_episode(raw, source_file=path, line=number, store=store)
    except OSError as error:
        raise EpisodeError(f"{os.fspath(path)}:1: line: cannot be read ({error.strerror or error})") from error


def write_episodes(path: str | os.PathLike[str], episodes: Iterable[Episode]) -> int:
    """Writes a JSONL file that appears whole, by rename; returns the count. Raises EpisodeError as ``dump`` does."""
    target, count = pathlib.Path(path), 0
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8", newline="\n") as file:
            for episode in episodes:
                file.write(dump(episode) + "\n")
                count += 1
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return count


def _parse(kind: Any, raw: bytes | str, source_file: str | os.PathLike[str], line: int) -> tuple[Any, Fail]:
    def fail(field: str, reason: str) -> EpisodeError:
        return EpisodeError(f"{os.fspath(source_file)}:{line}: {field}: {reason}")

    value = strict_json.loads(raw, fail=fail)
    version = value.get("format_version", FORMAT_VERSION) if isinstance(value, dict) else FORMAT_VERSION
    if type(version) is not int or version != FORMAT_VERSION:  # before the fields: an old file should not look broken
        raise fail("format_version", f"is {version!r:.80}; this code reads {FORMAT_VERSION}; convert the file")
    return strict_json.decode(kind, value, fail=fail), fail


# Invariants


def check_task(task: TaskSpec, *, fail: Fail) -> None:
    """What the types cannot say of a task. Raises what ``fail(field, reason)`` makes."""
    for name in ("task_id", "instruction"):
        if not getattr(task, name).strip():
            raise fail(name, "is empty")
    _check_size(task.env.screen, "env.screen", fail)
    for i, asset in enumerate(task.assets):
        _check_hash(asset.sha256, f"assets[{i}].sha256", fail)
        if asset.bytes < 0:
            raise fail(f"assets[{i}].bytes", f"must not be negative, got {asset.bytes}")
    if not task.channels or len(set(task.channels)) != len(task.channels):
        raise fail("channels", "needs computer_use, bash or both, each once")
    for name in ("max_turns", "agent_s", "tool_s", "tokens"):
        if getattr(task.limits, name) <= 0:
            raise fail(f"limits.{name}", f"must be positive, got {getattr(task.limits, name)}")


def check_episode(
    episode: Episode, *, fail: Fail, store: ImageStore | None = None, image_pad_id: int | None = None
) -> None:
    """What the types cannot say of an episode; arguments as in ``parse_episode``.

    Raises:
      what ``fail(field, reason)`` makes.
    """
    for name in ("episode_id", "task_id"):
        if not getattr(episode, name):
            raise fail(name, "is empty")
    if (episode.prompt == "chat") == bool(episode.instruction.strip()):
        raise fail("instruction", "is empty exactly for a chat, whose opening message is in initial")
    _check_size(episode.screen, "screen", fail)
    for i, observation in enumerate(episode.initial):
        _check_observation(observation, f"initial[{i}]", fail, store)
    if not episode.turns and episode.outcome.kind not in EXCLUDED:
        raise fail("turns", f"is empty, which outcome {episode.outcome.kind} cannot be")
    for i, turn in enumerate(episode.turns):
        before = episode.turns[i - 1] if i else None
        follows = (before.index + 1, 0) if before else (1, 0)
        again = (before.index, before.attempt + 1) if before and not before.accepted else follows
        if (turn.index, turn.attempt) not in (follows, again):
            raise fail(
                f"turns[{i}].index",
                f"turn {turn.index} attempt {turn.attempt} cannot stand here; expected {follows}"
                + (f" or {again}" if again != follows else ""),
            )
        _check_turn(turn, f"turns[{i}]", fail, store, image_pad_id)
        if episode.prompt != "chat" and turn.accepted and turn.channel == "none":
            raise fail(
                f"turns[{i}].channel", f"is none, but an accepted turn of prompt {episode.prompt} calls something"
            )
    if (episode.reward is None) != (episode.outcome.kind in EXCLUDED):
        raise fail("reward", f"must be null exactly for {', '.join(sorted(EXCLUDED))}; outcome {episode.outcome.kind}")
    _check_versions(episode, fail)


def _check_turn(turn: Turn, field: str, fail: Fail, store: ImageStore | None, image_pad_id: int | None) -> None:
    if (turn.parsed is None) == (turn.error is None):
        raise fail(f"{field}.parsed", "exactly one of parsed and error must be null")
    if turn.accepted and turn.parsed is None:
        raise fail(f"{field}.accepted", "a turn that could not be read cannot be accepted")
    names = {call.name for call in turn.parsed.calls} if turn.parsed else set()
    if names != (set() if turn.channel == "none" else {turn.channel}):
        raise fail(f"{field}.channel", f"is {turn.channel}, but the turn calls {', '.join(sorted(names)) or 'nothing'}")
    for i, call in enumerate(turn.parsed.calls if turn.parsed else ()):
        try:
            ToolCall.from_arguments(call.name, call.arguments)
        except ProtocolError as error:
            raise fail(f"{field}.parsed.calls[{i}]", str(error)) from None
    for i, observation in enumerate(turn.results):
        _check_observation(observation, f"{field}.results[{i}]", fail, store)
    if turn.sampled is not None:
        _check_sampled(turn.sampled, f"{field}.sampled", fail, store, image_pad_id)


def _check_observation(observation: Observation, field: str, fail: Fail, store: ImageStore | None) -> None:
    for i, part in enumerate(observation.parts):
        if (part.text is None) == (part.image is None):
            raise fail(f"{field}.parts[{i}]", "exactly one of text and image must be null")
        if part.image is not None:
            _check_image(part.image.sha256, f"{field}.parts[{i}].image.sha256", fail, store)
            _check_size((part.image.width, part.image.height), f"{field}.parts[{i}].image", fail)
    images, count = len(observation.images), len(observation.parts)
    if observation.kind == "screenshot" and (images, count) != (1, 1):
        raise fail(f"{field}.parts", "a screenshot is one picture")
    if observation.kind == "output" and (images, count) != (0, 1):
        raise fail(f"{field}.parts", "an output is one text")
    if observation.kind == "user" and not count:
        raise fail(f"{field}.parts", "is empty")
    if observation.seconds is not None and observation.seconds < 0:
        raise fail(f"{field}.seconds", f"must not be negative, got {observation.seconds}")


def _check_sampled(
    sampled: Sampled, field: str, fail: Fail, store: ImageStore | None, image_pad_id: int | None
) -> None:
    count = len(sampled.gen_ids)
    for name in ("gen_logp", "gen_version"):
        if len(getattr(sampled, name)) != count:
            raise fail(f"{field}.{name}", f"has {len(getattr(sampled, name))} entries for {count} gen_ids")
    for name in ("prompt_ids", "gen_ids", "gen_version"):
        values = getattr(sampled, name)
        if values and not (min(values) >= 0 and max(values) <= _MAX_INT32):
            raise fail(f"{field}.{name}", f"must lie in [0, {_MAX_INT32}], got {min(values)} to {max(values)}")
    if sampled.gen_logp and max(sampled.gen_logp) > 0:
        raise fail(f"{field}.gen_logp", f"a log-probability is at most 0, got {max(sampled.gen_logp)}")
    end = 0
    for i, image in enumerate(sampled.images):
        place = f"{field}.images[{i}]"
        _check_image(image.sha256, f"{place}.sha256", fail, store)
        _check_size((image.width, image.height), place, fail)
        start, stop = image.token_span
        if min(image.grid) < 1:
            raise fail(f"{place}.grid", f"must be positive, got {image.grid}")
        if not end <= start < stop <= len(sampled.prompt_ids):
            raise fail(f"{place}.token_span", f"[{start}, {stop}) does not follow {end} inside the prompt")
        if image_pad_id is not None and set(sampled.prompt_ids[start:stop]) != {image_pad_id}:
            raise fail(f"{place}.token_span", f"covers tokens other than image_pad {image_pad_id}")
        end = stop
    if image_pad_id is not None:
        covered = sum(image.token_span[1] - image.token_span[0] for image in sampled.images)
        if covered != sampled.prompt_ids.count(image_pad_id):
            pads = sampled.prompt_ids.count(image_pad_id)
            raise fail(f"{field}.images", f"cover {covered} tokens, but the prompt has {pads} image_pad")


def _check_versions(episode: Episode, fail: Fail) -> None:
    seen = [v for turn in episode.turns if turn.sampled for v in turn.sampled.gen_version]
    versions = episode.versions
    if versions is None:
        if seen:
            raise fail("versions", "is null, but turns were sampled")
    elif versions.min > versions.max or (seen and (versions.min, versions.max) != (min(seen), max(seen))):
        found = f"{min(seen)} to {max(seen)}" if seen else "none"
        raise fail("versions", f"says {versions.min} to {versions.max}; the tokens' versions: {found}")


def _check_size(size: tuple[int, int] | None, field: str, fail: Fail) -> None:
    if size is not None and min(size) < 1:
        raise fail(field, f"width and height must be positive, got {size[0]}x{size[1]}")


def _check_hash(sha256: str, field: str, fail: Fail) -> None:
    if not is_sha256(sha256):
        raise fail(field, f"is not a sha256 of 64 lower-case hex digits: {sha256!r:.80}")


def _check_image(sha256: str, field: str, fail: Fail, store: ImageStore | None) -> None:
    _check_hash(sha256, field, fail)
    if store is not None and sha256 not in store:
        raise fail(field, f"{sha256} is not in the image store {store.root}")
