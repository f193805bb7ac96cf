"""A scripted chat-completions server on the loopback interface, and the pieces that several test files share."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from mage_jax.llm.client import Message, Reply, Request, Usage

PNG = b"\x89PNG\r\n\x1a\n" + b"first"
OTHER_PNG = b"\x89PNG\r\n\x1a\n" + b"second"
JPEG = b"\xff\xd8\xff\xe0 picture"
TOKEN = "sk-very-secret-0123456789"


def request(text="What is on the screen?", **changes) -> Request:
    defaults = {"messages": (Message("user", text),), "model": "m", "purpose": "test"}
    return Request(**(defaults | changes))


def completion(text="hello", **changes) -> dict:
    body = {
        "id": "call-1",
        "model": "m-2026",
        "choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 100,
            "completion_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 40},
        },
    }
    return body | changes


@dataclasses.dataclass
class Answer:
    """What the server does with one call: a status and a body, after a delay, whole or in drips."""

    status: int = 200
    body: bytes | dict = dataclasses.field(default_factory=completion)
    headers: dict = dataclasses.field(default_factory=dict)
    delay: float = 0.0
    drip: float = 0.0  # seconds between bytes
    hang_up: bool = False


class Server:
    def __init__(self):
        self.script: list[Answer] = []
        self.default: Answer | None = None
        self.reply: Callable[[dict], Answer] | None = None
        self.calls: list[dict] = []
        self.headers: list[dict] = []
        self.in_flight = self.most_in_flight = 0
        self.url = ""
        self.stop: Callable[[], None] = lambda: None
        self._lock = threading.Lock()

    def next(self, body: dict, headers: dict) -> Answer:
        with self._lock:
            self.calls.append(body)
            self.headers.append(headers)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            if self.reply is not None:
                return self.reply(body)
            return self.script.pop(0) if self.script else (self.default or Answer())

    def done(self) -> None:
        with self._lock:
            self.in_flight -= 1


@contextlib.contextmanager
def serve() -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def do_POST(self):
            raw = self.rfile.read(int(self.headers["Content-Length"]))
            answer = state.next(json.loads(raw) | {"_path": self.path}, dict(self.headers))
            try:
                self._send(answer)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True
            finally:
                state.done()

        def _send(self, answer):
            time.sleep(answer.delay)
            if answer.hang_up:
                self.close_connection = True
                return
            body = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if not answer.drip:
                self.wfile.write(body)
            for byte in body if answer.drip else b"":
                self.wfile.write(bytes([byte]))
                self.wfile.flush()
                time.sleep(answer.drip)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}/v1"

    def stop():
        server.shutdown()
        server.server_close()
        thread.join()

    state.stop = stop
    try:
        yield state
    finally:
        if thread.is_alive():
            stop()


class Scripted:
    """A client that gives prepared texts in order, and keeps what it was asked."""

    def __init__(self, *texts, finish_reason="stop", cost_usd=None):
        self.texts = list(texts)
        self.asked: list[Request] = []
        self.rest = {
            "model": "scripted",
            "finish_reason": finish_reason,
            "usage": Usage(10, 4, 3),
            "cost_usd": cost_usd,
        }

    def complete(self, request: Request) -> Reply:
        self.asked.append(request)
        return Reply(text=self.texts.pop(0), **self.rest)
