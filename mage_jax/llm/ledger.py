"""What calls cost: a price table as data, one JSONL row per call, and sums over any columns.

Prices are never built in, they age: they come from a JSON file that the run names and every row repeats its id::

    {"id": "2026-11", "models": {"teacher": {"prompt": 1.25, "cached_prompt": 0.125, "completion": 10.0},
                                 "local": "unpriced"}}

in US dollars per million tokens. ``prompt`` is the price of uncached prompt tokens.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mage_jax.llm.client import Client, LLMError, Reply, Request, Usage, request_key
from mage_jax.llm.jsonl import AppendLog
from mage_jax.llm.structured import InvalidJson, decode_object

UNPRICED = "unpriced"
ROW_VERSION = 1


class LedgerError(LLMError):
    """A price table or a ledger row cannot be used; file and field are named."""


class UnknownModel(LedgerError):
    """The price table does not list a model. Give its price, or the word ``unpriced``."""


class BudgetExceeded(LedgerError):
    """The spending limit is reached; nothing was asked."""


@dataclasses.dataclass(frozen=True)
class Price:
    """US dollars per million tokens: uncached prompt, cached prompt, completion."""

    prompt: float
    cached_prompt: float
    completion: float

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or value < 0:
                raise LedgerError(f"Price.{name}: must be a number >= 0, got {value!r}")

    def usd(self, usage: Usage) -> float:
        """US dollars of one call."""
        tokens = (usage.uncached_prompt, usage.cached_prompt, usage.completion)
        return math.fsum(n * p for n, p in zip(tokens, dataclasses.astuple(self), strict=True)) / 1e6


@dataclasses.dataclass(frozen=True)
class PriceTable:
    """Prices by model name as requested; None marks a model that is deliberately without one.

    Attributes:
      id: written into every row, so that old rows stay explainable.
      models: name to price.
    """

    id: str
    models: Mapping[str, Price | None]

    def price(self, model: str) -> Price | None:
        """The model's price, None if unpriced. Raises ``UnknownModel``."""
        if model not in self.models:
            known = ", ".join(sorted(self.models)) or "none"
            raise UnknownModel(
                f"price table {self.id!r}: no model {model!r} (known: {known}); add it or mark it {UNPRICED!r}"
            )
        return self.models[model]

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PriceTable:
        """Reads a JSON file. Raises ``LedgerError`` naming file and field."""
        path = Path(path)
        try:
            data = decode_object(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise LedgerError(f"{path}: cannot be read ({error.strerror or error})") from error
        except (InvalidJson, UnicodeDecodeError) as error:
            raise LedgerError(f"{path}: {error}") from None
        if set(data) != {"id", "models"} or not isinstance(data["id"], str) or not isinstance(data["models"], dict):
            raise LedgerError(f"{path}: needs exactly id (a string) and models (an object)")
        models: dict[str, Price | None] = {}
        for name, value in data["models"].items():
            if value == UNPRICED:
                models[name] = None
                continue
            fields = {f.name for f in dataclasses.fields(Price)}
            if not isinstance(value, dict) or set(value) != fields:
                raise LedgerError(
                    f"{path}: models.{name}: must be {UNPRICED!r} or hold exactly {', '.join(sorted(fields))}"
                )
            try:
                models[name] = Price(**value)
            except LedgerError as error:
                raise LedgerError(f"{path}: models.{name}: {error}") from None
        return cls(data["id"], models)


class Ledger:
    """An append-only file of calls. Crash-safe: a row is on the disk when ``add`` returns, a torn last one is cut."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        prices: PriceTable,
        *,
        clock: Callable[[], float] = time.time,
    ):
        """``clock`` gives seconds since 1970."""
        self._log = AppendLog(path)
        self._clock = clock
        self.path = self._log.path
        self.prices = prices

    @property
    def torn_bytes(self) -> int:
        """Bytes of unfinished rows cut or left out by this object."""
        return self._log.torn_bytes

    def add(self, request: Request, reply: Reply, *, seconds: float = 0.0) -> dict[str, Any]:
        """Prices one call and writes its row, which is returned.

        Raises:
          UnknownModel: the requested model has no entry.
          JsonlError: the file cannot be written.
        """
        price = self.prices.price(request.model)
        row = {
            "version": ROW_VERSION,
            "time": datetime.datetime.fromtimestamp(self._clock(), datetime.UTC).isoformat(timespec="milliseconds"),
            "purpose": request.purpose,
            "phase": request.phase,
            "labels": dict(request.labels),
            "model": request.model,
            "reply_model": reply.model,
            "prompt_uncached": reply.usage.uncached_prompt,
            "prompt_cached": reply.usage.cached_prompt,
            "completion": reply.usage.completion,
            "prices": self.prices.id,
            "usd": None if price is None else price.usd(reply.usage),
            "replayed": reply.replayed,
            "finish_reason": reply.finish_reason,
            "seconds": round(seconds, 3),
            "key": request_key(request),
            "id": reply.id,
        }
        self._log.append(row)
        return row

    def rows(self) -> list[dict[str, Any]]:
        """All complete rows. Raises as ``read_rows``."""
        return _checked_rows(self._log)

    def summary(self, by: Sequence[str] = ("purpose", "model")) -> list[Sums]:
        """``summarise`` over this file."""
        return summarise(self.rows(), by=by)


def read_rows(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The complete rows of a ledger file; [] if it does not exist yet.

    Raises:
      LedgerError: a row of another version or with a wrong field.
      JsonlError: a line that is not JSON.
    """
    return _checked_rows(AppendLog(path))


def _checked_rows(log: AppendLog) -> list[dict[str, Any]]:
    rows = []
    for line, row in log.rows():
        if row.get("version") != ROW_VERSION:
            raise LedgerError(f"{log.path}:{line}: version: must be {ROW_VERSION}, got {row.get('version')!r}")
        for name, kinds in _ROW_FIELDS.items():
            value = row.get(name, ...)  # None is a value
            if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
                raise LedgerError(f"{log.path}:{line}: {name}: is missing or wrong ({row.get(name)!r:.80})")
        rows.append(row)
    return rows


_ROW_FIELDS: dict[str, Any] = {
    "purpose": str,
    "phase": str,
    "labels": dict,
    "model": str,
    "prompt_uncached": int,
    "prompt_cached": int,
    "completion": int,
    "usd": (int, float, type(None)),
    "replayed": bool,
}


@dataclasses.dataclass(frozen=True)
class Sums:
    """Totals of the rows that agree in the columns of ``group``.

    Attributes:
      group: column to value.
      calls: all rows; ``replayed_calls`` and ``unpriced_calls`` are among them.
      prompt_uncached, prompt_cached, completion: tokens of all rows.
      usd: paid, that is without replayed rows.
      replayed_usd: what the replayed rows would have cost.
    """

    group: Mapping[str, str]
    calls: int
    replayed_calls: int
    unpriced_calls: int
    prompt_uncached: int
    prompt_cached: int
    completion: int
    usd: float
    replayed_usd: float

    @property
    def tokens(self) -> int:
        return self.prompt_uncached + self.prompt_cached + self.completion


def summarise(rows: Iterable[Mapping[str, Any]], *, by: Sequence[str] = ("purpose", "model")) -> list[Sums]:
    """Sums per combination of columns, sorted by them; ``by=()`` gives one grand total (none for no rows).

    Args:
      rows: of ``read_rows``.
      by: column names (``purpose``, ``phase``, ``model``, ``reply_model``, ``prices``), or names of labels such as
        ``skill``; a row without that label counts under "".

    Raises:
      LedgerError: a column that cannot be grouped by.
    """
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(_column(row, name) for name in by), []).append(row)
    return [_sums(dict(zip(by, key, strict=True)), groups[key]) for key in sorted(groups)]


def _column(row: Mapping[str, Any], name: str) -> str:
    value = row[name] if name in row else row["labels"].get(name, "")
    if not isinstance(value, str):
        raise LedgerError(f"by: {name!r} holds {type(value).__name__} values; group by text columns or labels")
    return value


def _sums(group: Mapping[str, str], rows: list[Mapping[str, Any]]) -> Sums:
    def total(name: str) -> int:
        return sum(row[name] for row in rows)

    def usd(replayed: bool) -> float:
        return math.fsum(row["usd"] for row in rows if row["replayed"] is replayed and row["usd"] is not None)

    return Sums(
        group=group,
        calls=len(rows),
        replayed_calls=sum(row["replayed"] for row in rows),
        unpriced_calls=sum(row["usd"] is None for row in rows),
        prompt_uncached=total("prompt_uncached"),
        prompt_cached=total("prompt_cached"),
        completion=total("completion"),
        usd=usd(False),
        replayed_usd=usd(True),
    )


class LedgerClient:
    """Writes a row for every answer of the inner client and fills ``Reply.cost_usd``."""

    def __init__(self, inner: Client, ledger: Ledger, *, limit_usd: float | None = None):
        """
        Args:
          inner: the client to ask.
          ledger: where the rows go.
          limit_usd: no further call once the ledger's paid rows (older runs' too) sum up to this; None sets no limit.
            Calls in flight are not counted, so the last ones may pass it.
        """
        self._inner = inner
        self._ledger = ledger
        self._limit = limit_usd
        self._spent = sum(s.usd for s in ledger.summary(by=()))
        self._lock = threading.Lock()

    @property
    def spent_usd(self) -> float:
        """Paid so far according to the ledger as it was found, and by this client since."""
        return self._spent

    def complete(self, request: Request) -> Reply:
        """Answers and records.

        Raises:
          UnknownModel, BudgetExceeded: before anything is paid.
          LLMError: what the inner client raises; a failed call has no row.
        """
        self._ledger.prices.price(request.model)
        if self._limit is not None and self._spent >= self._limit:
            raise BudgetExceeded(
                f"{self._ledger.path}: {self._spent:.4f} USD are spent, the limit is {self._limit:g}; raise limit_usd"
            )
        start = time.monotonic()
        reply = self._inner.complete(request)
        row = self._ledger.add(request, reply, seconds=time.monotonic() - start)
        if row["usd"] is not None and not reply.replayed:
            with self._lock:
                self._spent += row["usd"]
        return reply.replace(cost_usd=row["usd"])


def format_summary(lines: Sequence[Sums]) -> str:
    """A plain text table, one line per group."""
    heads = (*(lines[0].group if lines else ()), "calls", "uncached", "cached", "completion", "usd", "replayed usd")
    cells = [
        (
            *s.group.values(),
            *(f"{n:,}" for n in (s.calls, s.prompt_uncached, s.prompt_cached, s.completion)),
            *(f"{v:.4f}" for v in (s.usd, s.replayed_usd)),
        )
        for s in lines
    ]
    widths = [max(len(row[i]) for row in (heads, *cells)) for i in range(len(heads))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in (heads, *cells))
