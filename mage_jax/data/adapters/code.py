"""pyautogui code to the protocol's calls, read through its syntax tree and never executed.

Only calls of a fixed list with literal arguments are understood; anything else (an unknown function, a variable, an
f-string, an assignment, a loop) is a ``CodeError`` that names the call and its line in the code. Two dialects:

* "pyautogui": ``pyautogui.click(...)`` and its kin, ``time.sleep``; the agent-style ``computer.terminate``,
  ``computer.wait`` and ``computer.triple_click`` of AgentNet. ``computer.wait()`` states no time: its tool description
  speaks of 20 seconds, which is taken;
* "bare": the same functions without a module, ``wait(seconds)`` and ``terminate(status)`` (ScaleCUA).

What a call means follows pyautogui 0.9.54: positive wheel clicks are up and right; ``press`` of a list presses one key
after the other; ``dragTo`` starts where the pointer is, so the code must have moved it there before; a click without
a position happens where the code last moved the pointer, and is an error if it never did.
"""

from __future__ import annotations

import ast
import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any, Literal

from mage_jax.agent.calls import MAX_CALLS, MAX_SCROLL
from mage_jax.data.adapters.base import AdapterError, Grid, Place
from mage_jax.data.adapters.turns import computer, tool_call

Dialect = Literal["pyautogui", "bare"]
MAX_CODE = 20_000  # characters of one step's code
MAX_NUMBER = 1_000_000  # of clicks, presses or seconds: more is a mistake
AGENT_WAIT_SECONDS = 20.0
_MISSING = object()


class CodeError(AdapterError):
    """Code that the reader does not understand. The text is ``file:line: field: code line N: call: reason``."""


@dataclasses.dataclass(frozen=True)
class _Function:
    """Parameters in pyautogui's order (``_``-prefixed ones and timing change nothing here) and the method to run."""

    parameters: tuple[str, ...]
    method: Callable[..., None]
    variadic: bool = False


def read_code(
    code: str, *, grid: Grid, scroll_per_click: float, place: Place, field: str, dialect: Dialect = "pyautogui"
) -> list[dict[str, Any]]:
    """The calls that a piece of code makes, points in [0, 999].

    Args:
      code: Python source.
      grid: converts its points.
      scroll_per_click: units of 1/999 screen that one wheel click scrolls.
      place, field: for errors.
      dialect: which names stand for what.

    Raises:
      CodeError: the code does not parse, or holds anything outside the list.
      AdapterError: a point outside its space, an argument that the protocol refuses.
    """
    reader = _Reader(grid, scroll_per_click, place, field)
    if len(code) > MAX_CODE:
        raise reader.fail(1, "code", f"has {len(code)} characters; at most {MAX_CODE} are read")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "\d" in foreign code is their matter
            tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise reader.fail(getattr(error, "lineno", None) or 1, "code", f"is not Python ({error})") from None
    names = _NAMES[dialect]
    for node in tree.body:
        if isinstance(node, ast.Import) and dialect == "pyautogui" and _known_modules(node):
            continue
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
            raise reader.fail(node.lineno, type(node).__name__, "only calls of the known functions are read")
        reader.run(node.value, names)
    return reader.finish()


class _Reader:
    """The state of the code read so far: where the pointer is, which keys are held."""

    def __init__(self, grid: Grid, scroll_per_click: float, place: Place, field: str):
        self.grid, self.scroll_per_click, self.place, self.field = grid, scroll_per_click, place, field
        self.calls: list[dict[str, Any]] = []
        self.pointer: list[int] | None = None
        self.held: list[str] = []
        self.chorded = False  # whether the keys held now were already used in a combination
        self.line, self.name = 1, "code"

    def fail(self, line: int, name: str, reason: str) -> CodeError:
        return CodeError(f"{self.place}: {self.field}: code line {line}: {name}: {reason}", kind=f"code: {name}"[:60])

    def wrong(self, reason: str) -> CodeError:
        return self.fail(self.line, self.name, reason)

    # One call

    def run(self, node: ast.Call, names: dict[str, _Function]) -> None:
        self.line, self.name = node.lineno, _dotted(node.func)
        function = names.get(self.name)
        if function is None:
            raise self.wrong(f"is not a known call; known: {', '.join(sorted(names))}")
        if any(isinstance(a, ast.Starred) for a in node.args) or any(k.arg is None for k in node.keywords):
            raise self.wrong("arguments must be written out, without * and **")
        positional = [self.literal(argument) for argument in node.args]
        if function.variadic:
            for keyword in node.keywords:
                if keyword.arg not in _IGNORED:
                    raise self.wrong(f"takes no argument {keyword.arg}")
            return function.method(self, positional)
        given = dict(zip(function.parameters, positional, strict=False))
        if len(positional) > len(function.parameters):
            raise self.wrong(f"takes at most {len(function.parameters)} arguments, got {len(positional)}")
        for keyword in node.keywords:
            if keyword.arg in given or keyword.arg not in {*function.parameters, *_IGNORED}:
                raise self.wrong(f"takes no argument {keyword.arg}, or takes it once")
            given[keyword.arg or ""] = self.literal(keyword.value)
        function.method(self, **{k: v for k, v in given.items() if k not in _IGNORED})

    def literal(self, node: ast.expr) -> Any:
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            raise self.wrong("arguments must be literal strings, numbers or lists") from None

    def add(self, call: dict[str, Any], *, keys: bool = False) -> None:
        if self.held and not keys:
            raise self.wrong(f"happens while {'+'.join(self.held)} is held, which the protocol cannot say")
        if len(self.calls) == MAX_CALLS:
            raise self.wrong(f"more than {MAX_CALLS} calls in one turn")
        tool_call(call, place=self.place, field=f"{self.field}: code line {self.line}: {self.name}")
        self.calls.append(call)

    def finish(self) -> list[dict[str, Any]]:
        if self.held:
            raise self.wrong(f"{'+'.join(self.held)} is never released")
        if not self.calls:
            raise self.fail(1, "code", "does nothing")
        return self.calls

    # Values

    def number(self, value: Any, name: str, *, whole: bool = False) -> float:
        if type(value) not in (int, float) or not abs(value) <= MAX_NUMBER:  # NaN compares false
            raise self.wrong(f"{name} must be a number of at most {MAX_NUMBER}, got {value!r:.80}")
        if whole and value != int(value):
            raise self.wrong(f"{name} must be whole, got {value}")
        return value

    def point(self, x: Any, y: Any) -> list[int]:
        """Where the pointer goes; without x and y where it is."""
        if isinstance(x, (list, tuple)) and len(x) == 2 and y is None:  # pyautogui takes a pair as well
            x, y = x
        if x is None and y is None:
            if self.pointer is None:
                raise self.wrong("has no position, and the code did not move the pointer before")
            return self.pointer
        field = f"{self.field}: code line {self.line}: {self.name}"
        self.pointer = self.grid.point(x, y, place=self.place, field=field)
        return self.pointer

    def string(self, value: Any, name: str) -> str:
        if not isinstance(value, str) or not value:
            raise self.wrong(f"{name} must be a non-empty string, got {value!r:.80}")
        return value

    # pyautogui's functions

    def click(self, x: Any = None, y: Any = None, clicks: Any = 1, button: Any = "left") -> None:
        point = self.point(x, y)
        button = {"primary": "left", "secondary": "right"}.get(button, button) if isinstance(button, str) else button
        count = int(self.number(clicks, "clicks", whole=True))
        if count == 1:
            self.add(computer("click", coordinate=point, **({} if button == "left" else {"button": button})))
        elif count in (2, 3) and button == "left":
            self.add(computer("double_click" if count == 2 else "triple_click", coordinate=point))
        else:
            raise self.wrong(f"{count} clicks of button {button!r:.40} have no equal in the protocol")

    def right_click(self, x: Any = None, y: Any = None) -> None:
        self.click(x, y, button="right")

    def middle_click(self, x: Any = None, y: Any = None) -> None:
        self.click(x, y, button="middle")

    def double_click(self, x: Any = None, y: Any = None, button: Any = "left") -> None:
        self.click(x, y, clicks=2, button=button)

    def triple_click(self, x: Any = None, y: Any = None, button: Any = "left") -> None:
        self.click(x, y, clicks=3, button=button)

    def move_to(self, x: Any = None, y: Any = None) -> None:
        if x is None and y is None:
            raise self.wrong("has no position")
        self.add(computer("move", coordinate=self.point(x, y)))

    def drag_to(self, x: Any = None, y: Any = None, button: Any = "left") -> None:
        if button not in ("left", "primary"):
            raise self.wrong(f"dragging with button {button!r:.40} has no equal in the protocol")
        if x is None and y is None:
            raise self.wrong("has no position")
        start = self.point(None, None)
        if self.calls and self.calls[-1] == computer("move", coordinate=start):
            self.calls.pop()  # the drag itself goes to its start
        self.add(computer("drag", start=start, end=self.point(x, y)))

    def write(self, message: Any = None) -> None:
        self.add(computer("type", text=self.string(message, "message")))

    def press(self, keys: Any = None, presses: Any = 1) -> None:
        count = int(self.number(presses, "presses", whole=True))
        if not 1 <= count <= MAX_CALLS:
            raise self.wrong(f"presses must be in [1, {MAX_CALLS}], got {count}")
        for key in (keys if isinstance(keys, (list, tuple)) else [keys]) * count:
            self.keypress([self.string(key, "keys")])

    def hotkey(self, keys: list[Any]) -> None:
        if len(keys) == 1 and isinstance(keys[0], (list, tuple)):
            keys = list(keys[0])
        if not keys:
            raise self.wrong("has no keys")
        self.keypress([self.string(key, "keys") for key in keys])

    def keypress(self, keys: list[str]) -> None:
        self.chorded = True
        self.add(computer("keypress", keys=[*self.held, *keys]), keys=True)

    def key_down(self, key: Any = None) -> None:
        if self.string(key, "key") in self.held:
            raise self.wrong(f"{key!r} is already held")
        self.held.append(key)
        self.chorded = False

    def key_up(self, key: Any = None) -> None:
        if self.string(key, "key") not in self.held:
            raise self.wrong(f"{key!r} is not held; a keyUp needs its keyDown in the same code")
        if not self.chorded:  # all of them were pressed for their own sake
            self.keypress([])
        self.held.remove(key)

    def scroll(self, clicks: Any = _MISSING, x: Any = None, y: Any = None) -> None:
        self.wheel("scroll_y", clicks, x, y)

    def hscroll(self, clicks: Any = _MISSING, x: Any = None, y: Any = None) -> None:
        self.wheel("scroll_x", clicks, x, y)

    def wheel(self, axis: str, clicks: Any, x: Any, y: Any) -> None:
        """Wheel clicks to parts of a screen, away from zero; more than one screen becomes several calls."""
        amount = self.number(clicks, "clicks") * self.scroll_per_click
        if not 0 < abs(amount) <= MAX_CALLS * MAX_SCROLL:
            raise self.wrong(f"scrolls {amount} units; expected 1 to {MAX_CALLS} screens of {MAX_SCROLL}, up or down")
        where = {} if x is None and y is None else {"coordinate": self.point(x, y)}
        left, sign = math.ceil(abs(amount) - 1e-9), 1 if amount > 0 else -1
        while left:
            step = min(left, MAX_SCROLL)
            left -= step
            self.add(computer("scroll", **{"scroll_x": 0, "scroll_y": 0, axis: sign * step}, **where))

    # Time and the end

    def sleep(self, seconds: Any = _MISSING) -> None:
        self.add(computer("wait", time=self.number(seconds, "seconds")))

    def agent_wait(self) -> None:
        self.add(computer("wait", time=AGENT_WAIT_SECONDS))

    def terminate(self, status: Any = _MISSING) -> None:
        if status not in ("success", "failure"):
            raise self.wrong("status must be 'success' or 'failure'")
        self.add(computer("terminate", status=status))


# Timing and logging change nothing that the protocol records.
_IGNORED = ("interval", "duration", "tween", "logScreenshot", "_pause", "mouseDownUp")
_MOUSE = ("x", "y")
_FUNCTIONS = {
    "click": _Function(("x", "y", "clicks", "interval", "button"), _Reader.click),
    "leftClick": _Function(_MOUSE, _Reader.click),
    "rightClick": _Function(_MOUSE, _Reader.right_click),
    "middleClick": _Function(_MOUSE, _Reader.middle_click),
    "doubleClick": _Function(("x", "y", "interval", "button"), _Reader.double_click),
    "tripleClick": _Function(("x", "y", "interval", "button"), _Reader.triple_click),
    "moveTo": _Function(("x", "y", "duration"), _Reader.move_to),
    "dragTo": _Function(("x", "y", "duration", "tween", "button"), _Reader.drag_to),
    "write": _Function(("message", "interval"), _Reader.write),
    "typewrite": _Function(("message", "interval"), _Reader.write),
    "press": _Function(("keys", "presses", "interval"), _Reader.press),
    "hotkey": _Function((), _Reader.hotkey, variadic=True),
    "keyDown": _Function(("key",), _Reader.key_down),
    "keyUp": _Function(("key",), _Reader.key_up),
    "scroll": _Function(("clicks", "x", "y"), _Reader.scroll),
    "vscroll": _Function(("clicks", "x", "y"), _Reader.scroll),
    "hscroll": _Function(("clicks", "x", "y"), _Reader.hscroll),
}
_TERMINATE = _Function(("status",), _Reader.terminate)
_NAMES: dict[str, dict[str, _Function]] = {
    "pyautogui": {
        **{f"pyautogui.{name}": function for name, function in _FUNCTIONS.items()},
        "pyautogui.sleep": _Function(("seconds",), _Reader.sleep),
        "time.sleep": _Function(("seconds",), _Reader.sleep),
        "computer.terminate": _TERMINATE,
        "computer.wait": _Function((), _Reader.agent_wait),
        "computer.triple_click": _Function(_MOUSE, _Reader.triple_click),
        "computer.tripleClick": _Function(_MOUSE, _Reader.triple_click),
    },
    "bare": {**_FUNCTIONS, "wait": _Function(("seconds",), _Reader.sleep), "terminate": _TERMINATE},
}


def _known_modules(node: ast.Import) -> bool:
    return all(alias.name in ("pyautogui", "time") and alias.asname is None for alias in node.names)


def _dotted(node: ast.expr) -> str:
    """``a.b`` of a function's name; the kind of node for anything that is not a name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return type(node).__name__
