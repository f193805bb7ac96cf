"""An OpenAI-compatible ``/chat/completions`` endpoint over httpx.

Nothing is taken from the environment but the bearer token, and that only from the variable that the config names: no
proxies, no netrc, no redirects. The token is in the request's header and nowhere else: not in errors, logs, replies or
``repr``.
"""

from __future__ import annotations

import dataclasses
import email.utils
import json
import os
import random
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any, Literal, NoReturn
from urllib.parse import urlsplit

import httpx

from mage_jax.llm.client import (
    FINISH_REASONS,
    InvalidRequest,
    LLMError,
    Message,
    Reply,
    Request,
    Usage,
    data_uri,
)

MAX_REPLY_BYTES = 64 * 1024 * 1024
_SECRET_LENGTH = 12  # a shorter token ("EMPTY") is a placeholder of a local server and may occur in honest text


class HttpConfigError(LLMError, ValueError):
    """A field of ``HttpConfig``, or the token that it names, cannot be used."""


class HttpError(LLMError):
    """A call failed for good. ``endpoint`` is the URL, ``attempts`` the calls made."""

    def __init__(self, endpoint: str, reason: str, *, attempts: int):
        tries = f" after {attempts} attempts" if attempts > 1 else ""
        super().__init__(f"{endpoint}: {reason}{tries}")
        self.endpoint = endpoint
        self.attempts = attempts


class HttpStatusError(HttpError):
    """The endpoint answered with another status than 200, kept in ``status``."""

    def __init__(self, endpoint: str, reason: str, *, attempts: int, status: int):
        super().__init__(endpoint, reason, attempts=attempts)
        self.status = status


class HttpConnectionError(HttpError):
    """No complete answer: refused, broken off, or too slow."""


class HttpReplyError(HttpError):
    """Status 200 with a body that is not a chat completion; the text names the field."""


@dataclasses.dataclass(frozen=True)
class HttpConfig:
    """Where and how to call. All times in seconds.

    Attributes:
      base_url: up to and without ``/chat/completions``, such as ``http://127.0.0.1:30000/v1``.
      token_env: name of the environment variable that holds the bearer token; None sends none.
      timeout: of one attempt, checked at every piece received: neither silence nor a dripping body outlasts it by much.
      connect_timeout: of the connection alone.
      max_retries: further attempts after status 429 or 5xx and after connection errors and timeouts.
      backoff, max_backoff: the wait before retry n is ``backoff * 2**n``, at most ``max_backoff``, times a random
        number in [0.5, 1].
      max_retry_after: the longest ``Retry-After`` that is waited for; a longer one ends the call with its error.
      concurrency: attempts in flight at once; further callers wait.
      proxy: URL of an HTTP proxy; None connects directly whatever the environment says.
      ca_file: PEM file of certificate authorities instead of the usual ones.
      json_mode: how a schema is sent: ``json_schema`` (constrained), ``json_object``, or ``none`` (prompt only).
      max_tokens_field: the name that this endpoint uses, ``max_tokens`` or ``max_completion_tokens``.
    """

    base_url: str
    token_env: str | None = None
    timeout: float = 120.0
    connect_timeout: float = 10.0
    max_retries: int = 5
    backoff: float = 0.5
    max_backoff: float = 30.0
    max_retry_after: float = 60.0
    concurrency: int = 8
    proxy: str | None = None
    ca_file: str | None = None
    json_mode: Literal["json_schema", "json_object", "none"] = "json_schema"
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"

    def __post_init__(self) -> None:
        try:
            url = urlsplit(self.base_url)
            ok = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
        except (ValueError, TypeError, AttributeError):
            ok = False
        if not ok:
            raise HttpConfigError("HttpConfig.base_url: must be an http:// or https:// address with a host")
        if self.proxy is not None and "@" in self.proxy:
            raise HttpConfigError(
                "HttpConfig.proxy: must hold no user or password; they would be shown with the config"
            )
        if "@" in url.netloc or url.query or url.fragment:
            # The URL is part of every error: it must not carry credentials.
            raise HttpConfigError("HttpConfig.base_url: must hold no user, password, query or fragment; use token_env")
        for name in ("timeout", "connect_timeout", "backoff", "max_backoff", "concurrency"):
            if not getattr(self, name) > 0:
                raise HttpConfigError(f"HttpConfig.{name}: must be positive, got {getattr(self, name)!r}")
        for name in ("concurrency", "max_retries"):
            if type(getattr(self, name)) is not int:
                raise HttpConfigError(f"HttpConfig.{name}: must be an integer, got {getattr(self, name)!r}")
        for name in ("max_retries", "max_retry_after"):
            if not getattr(self, name) >= 0:
                raise HttpConfigError(f"HttpConfig.{name}: must not be negative, got {getattr(self, name)!r}")
        for name, known in (
            ("json_mode", ("json_schema", "json_object", "none")),
            ("max_tokens_field", ("max_tokens", "max_completion_tokens")),
        ):
            if getattr(self, name) not in known:
                raise HttpConfigError(f"HttpConfig.{name}: {getattr(self, name)!r} is not one of {', '.join(known)}")

    @property
    def endpoint(self) -> str:
        return self.base_url.rstrip("/") + "/chat/completions"


class _Retry(Exception):
    """An attempt failed in a way that may pass; ``wait`` is the endpoint's wish in seconds."""

    def __init__(self, error: HttpError, wait: float = 0.0):
        self.error = error
        self.wait = wait


class HttpClient:
    """The backend. Safe to share by threads; close it, or use it as a context manager.

    Raises (on construction):
      HttpConfigError: the token's variable is not set, or its value cannot be a header.
    """

    def __init__(
        self,
        config: HttpConfig,
        *,
        sleep: Callable[[float], None] = time.sleep,
        jitter: Callable[[], float] = random.random,
    ):
        """``sleep`` and ``jitter`` (uniform in [0, 1)) exist to be replaced in tests."""
        self.config = config
        self._sleep = sleep
        self._jitter = jitter
        self._token = _read_token(config.token_env)
        self._slots = threading.BoundedSemaphore(config.concurrency)
        verify: Any = True
        if config.ca_file is not None:
            verify = ssl.create_default_context(cafile=config.ca_file)
        self._http = httpx.Client(
            trust_env=False,
            follow_redirects=False,
            proxy=config.proxy,
            verify=verify,
            timeout=httpx.Timeout(config.timeout, connect=config.connect_timeout),
            # Attempts are limited by _slots alone: a full pool would count as a timeout of those that wait for it.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=config.concurrency),
        )

    def __enter__(self) -> HttpClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"HttpClient({self.config.endpoint})"

    def close(self) -> None:
        self._http.close()

    def complete(self, request: Request) -> Reply:
        """Answers one request.

        Raises:
          HttpStatusError: a status other than 200 that is not worth, or no longer worth, another attempt.
          HttpConnectionError: no complete answer within the allowed attempts.
          HttpReplyError: the body is not a chat completion; never tried again, since it was paid for.
        """
        body = json.dumps(request_body(request, self.config)).encode("ascii")
        for attempt in range(1, self.config.max_retries + 2):
            try:
                with self._slots:  # not held while waiting for the next attempt
                    raw = self._attempt(body, attempt)
                return self._parse(raw, attempt)
            except _Retry as retry:
                if attempt > self.config.max_retries or retry.wait > self.config.max_retry_after:
                    raise retry.error from retry.__cause__
                delay = min(self.config.backoff * 2.0 ** (attempt - 1), self.config.max_backoff)
                # Jitter on top of the endpoint's wish: clients that were refused together must not return together.
                delay *= 0.5 + 0.5 * self._jitter()
                self._sleep(delay if retry.wait == 0 else retry.wait + delay * 0.5)
        raise AssertionError("unreachable")

    def _attempt(self, body: bytes, attempt: int) -> bytes:
        endpoint = self.config.endpoint
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        deadline = time.monotonic() + self.config.timeout
        try:
            with self._http.stream("POST", endpoint, content=body, headers=headers) as response:
                raw = bytearray()
                for chunk in response.iter_bytes():
                    raw += chunk
                    # httpx limits the silence between two chunks; a body that drips must end as well.
                    if time.monotonic() > deadline:
                        raise httpx.ReadTimeout("the body took too long")
                    if len(raw) > MAX_REPLY_BYTES:
                        raise HttpReplyError(endpoint, f"the body exceeds {MAX_REPLY_BYTES} bytes", attempts=attempt)
        except httpx.TimeoutException as error:
            reason = f"no complete answer in time ({type(error).__name__}; timeout {self.config.timeout:g} s)"
            raise _Retry(HttpConnectionError(endpoint, reason, attempts=attempt)) from error
        except httpx.TransportError as error:
            reason = f"connection failed ({type(error).__name__}: {self._redact(str(error))})"
            raise _Retry(HttpConnectionError(endpoint, reason, attempts=attempt)) from error
        except httpx.RequestError as error:
            reason = f"unreadable answer ({type(error).__name__})"
            raise HttpReplyError(endpoint, reason, attempts=attempt) from error
        if response.status_code == 200:
            return bytes(raw)
        excerpt = self._redact(" ".join(raw.decode("utf-8", "replace").split()))[:300]
        reason = f"status {response.status_code}" + (f": {excerpt}" if excerpt else "")
        wait = retry_after(response.headers.get("Retry-After"), time.time())
        reason += f" (it asks to wait {wait:.0f} s)" if wait else ""
        failure = HttpStatusError(endpoint, reason, attempts=attempt, status=response.status_code)
        if response.status_code == 429 or response.status_code >= 500:
            raise _Retry(failure, wait)
        raise failure

    def _redact(self, text: str) -> str:
        return text.replace(self._token, "[token]") if self._token else text

    def _parse(self, raw: bytes, attempt: int) -> Reply:
        def fail(reason: str) -> NoReturn:
            raise HttpReplyError(self.config.endpoint, f"status 200 but {self._redact(reason)}", attempts=attempt)

        try:
            data = json.loads(raw)
        except (ValueError, RecursionError):
            fail("the body is not JSON")
        try:
            reply = parse_completion(data)
        except (InvalidRequest, TypeError, KeyError) as error:
            fail(str(error))
        if len(self._token) >= _SECRET_LENGTH and any(self._token in v for v in (reply.text, reply.model, reply.id)):
            # It would end in cassettes and data sets.
            fail("the answer repeats the bearer token; it is withheld")
        return reply


def _read_token(name: str | None) -> str:
    if name is None:
        return ""
    token = os.environ.get(name, "")
    if not token:
        raise HttpConfigError(f"HttpConfig.token_env: the environment variable {name} is not set")
    if not token.isascii() or not token.isprintable() or " " in token:
        # httpx would quote the value in its own error.
        raise HttpConfigError(
            f"HttpConfig.token_env: the value of {name} is not a bearer token (white space or non-ASCII)"
        )
    return token


def request_body(request: Request, config: HttpConfig) -> dict[str, Any]:
    """The JSON that is sent. Purpose, phase and labels are not."""
    body: dict[str, Any] = {
        "model": request.model,
        "messages": [_wire_message(message) for message in request.messages],
        config.max_tokens_field: request.max_tokens,
        "temperature": request.temperature,
        "stream": False,
    }
    if request.seed is not None:
        body["seed"] = request.seed
    if request.schema is not None and config.json_mode == "json_schema":
        form = {"name": "reply", "strict": True, "schema": request.schema}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
    elif request.schema is not None and config.json_mode == "json_object":
        body["response_format"] = {"type": "json_object"}
    return body


def _wire_message(message: Message) -> dict[str, Any]:
    if not message.images:
        return {"role": message.role, "content": message.text}
    content: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": data_uri(image)}} for image in message.images
    ]
    if message.text:
        content.append({"type": "text", "text": message.text})
    return {"role": message.role, "content": content}


def _field(data: Any, key: str, kind: type, where: str) -> Any:
    value = data.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise InvalidRequest(f"{where}{key} must be {kind.__name__}, got {type(value).__name__}")
    return value


def parse_completion(data: Any) -> Reply:
    """A chat completion to a ``Reply``. Unknown fields are ignored, known ones must be as documented.

    Raises:
      InvalidRequest: a field is missing or wrong (named).
    """
    if not isinstance(data, dict):
        raise InvalidRequest(f"the body must be an object, got {type(data).__name__}")
    if data.get("error"):
        raise InvalidRequest(f"the body is an error: {data['error']!r:.200}")
    choices = _field(data, "choices", list, "")
    if len(choices) != 1 or not isinstance(choices[0], dict):
        raise InvalidRequest(f"choices must hold one object, got {len(choices)} items")
    message = _field(choices[0], "message", dict, "choices[0].")
    if message.get("role", "assistant") != "assistant":
        raise InvalidRequest(f"choices[0].message.role must be assistant, got {message['role']!r:.80}")
    finish = _field(choices[0], "finish_reason", str, "choices[0].")
    if finish not in FINISH_REASONS:
        raise InvalidRequest(f"choices[0].finish_reason {finish!r:.80} is not one of {', '.join(FINISH_REASONS)}")
    text = message.get("content")
    if text is None and finish == "content_filter":
        text = ""
    if not isinstance(text, str):
        refusal = message.get("refusal")
        told = f" (refusal: {refusal:.200})" if isinstance(refusal, str) else ""
        raise InvalidRequest(f"choices[0].message.content must be str, got {type(text).__name__}{told}")
    usage = _field(data, "usage", dict, "")
    details = usage.get("prompt_tokens_details")
    if details is not None and not isinstance(details, dict):
        raise InvalidRequest(f"usage.prompt_tokens_details must be dict, got {type(details).__name__}")
    cached = (details or {}).get("cached_tokens")  # absent where the endpoint has no prompt cache
    return Reply(
        text=text,
        usage=Usage(
            prompt=_field(usage, "prompt_tokens", int, "usage."),
            cached_prompt=0 if cached is None else cached,
            completion=_field(usage, "completion_tokens", int, "usage."),
        ),
        model=_field(data, "model", str, ""),
        finish_reason=finish,
        id=data["id"] if isinstance(data.get("id"), str) else "",
    )


def retry_after(value: str | None, now: float) -> float:
    """Seconds that a ``Retry-After`` header (a number, or an HTTP date) asks for; 0 where it says nothing usable."""
    if value is None:
        return 0.0
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - now
        except (ValueError, TypeError, OverflowError):
            return 0.0
    return seconds if 0 < seconds < float("inf") else 0.0
