"""Output folders that are either complete or absent."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mage_jax.weights.errors import WeightsError


@contextlib.contextmanager
def atomic_folder(out: Path, *, need_bytes: int = 0, copied: Path | None = None) -> Iterator[Path]:
    """Yields a temporary sibling of ``out`` that becomes ``out`` when the block ends well.

    On success every file is flushed to the disk before the rename. On any exception, Ctrl-C included, the temporary
    folder is removed and ``out`` is as it was.

    Args:
      out: folder to create; it may exist if empty.
      need_bytes: refuse at once when the disk has less room than this.
      copied: folder that the block will copy; refuse at once when ``out`` lies inside it.

    Raises:
      WeightsError: ``out`` exists and is not an empty folder, or lies inside ``copied``.
      OSError: ENOSPC when the disk is full, or any other error of the block.
    """
    out = Path(os.path.abspath(out))
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise WeightsError(f"{out} already exists; choose another folder or remove it first")
    if copied is not None:
        _refuse_inside(out, copied, copied)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as e:
        raise NotADirectoryError(errno.ENOTDIR, "cannot be created, a part of the path is a file", str(out)) from e
    except OSError as e:
        raise OSError(e.errno, f"the folder cannot be created, {e.filename}: {e.strerror}", str(out)) from e
    free = shutil.disk_usage(out.parent).free
    if free < need_bytes:
        raise OSError(
            errno.ENOSPC,
            f"{size_text(need_bytes)} are needed, {size_text(free)} are free; nothing written",
            str(out),
        )
    temporary = out.parent / f".{out.name}.tmp-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process that had our id
    try:
        temporary.mkdir()
    except OSError as e:  # the name that the user gave, not the hidden one
        raise OSError(e.errno, f"the folder cannot be created: {e.strerror}", str(out)) from e
    try:
        yield temporary
        flush(temporary)
        os.rename(temporary, out)  # replaces an empty folder
        _fsync(out.parent)
    except BaseException as e:
        shutil.rmtree(temporary, ignore_errors=True)
        if is_disk_full(e):
            message = f"the disk is full ({size_text(need_bytes)} are needed); the unfinished folder was removed"
            raise OSError(errno.ENOSPC, message, str(out)) from e
        raise


def size_text(count: int) -> str:
    """A number of bytes in the largest decimal unit that keeps it at 1 or more."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} bytes"


def _refuse_inside(target: Path, folder: Path, source: Path) -> None:
    """Raises where copying ``folder`` (a part of ``source``) to ``target`` would copy the copy, links resolved."""
    real = Path(os.path.realpath(folder))
    if Path(os.path.realpath(target)).is_relative_to(real):
        if folder != source:
            raise WeightsError(
                f"{folder} links to {real}, which holds the output folder: remove the link or choose another"
            )
        raise WeightsError(f"{target} lies inside {source}, which is copied into it; choose an output folder outside")


def is_disk_full(error: BaseException) -> bool:
    """Whether an exception means that the disk is full; tensorstore only says so in words."""
    return getattr(error, "errno", None) == errno.ENOSPC or "No space left on device" in str(error)


def flush(folder: Path) -> None:
    """fsync of every file and folder below ``folder``, itself included."""
    paths = [path for root, _, files in os.walk(folder) for path in (*(Path(root) / f for f in files), Path(root))]
    with ThreadPoolExecutor(16) as pool:  # hundreds of small files: the journal commits waiting ones together
        for _ in pool.map(_fsync, paths):
            pass


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def copy_tree(source: Path, target: Path, *, skip: Callable[[Path], bool] = lambda _: False) -> int:
    """Copies files, subfolders too, following links (a hub cache is made of links). Returns the bytes copied.

    Args:
      source: folder to copy from.
      target: created if absent.
      skip: called with paths relative to ``source``; True leaves a file or a whole folder out.

    Raises:
      WeightsError: ``target`` lies inside a folder that would be copied; nothing was written.
    """
    total = 0
    for folder, _, _ in _walk(source, skip):
        _refuse_inside(target, folder, source)
    target.mkdir(parents=True, exist_ok=True)
    for root, folders, files in _walk(source, skip):
        relative = root.relative_to(source)
        for name in folders:
            (target / relative / name).mkdir(exist_ok=True)
        for name in sorted(files):
            if not skip(relative / name):
                destination = target / relative / name
                shutil.copyfile(root / name, destination)
                total += destination.stat().st_size
    return total


def _walk(source: Path, skip: Callable[[Path], bool]) -> Iterator[tuple[Path, list[str], list[str]]]:
    for root, folders, files in os.walk(source, followlinks=True):
        folders[:] = sorted(f for f in folders if not skip((Path(root) / f).relative_to(source)))
        yield Path(root), folders, files
