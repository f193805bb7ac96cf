"""pyautogui code is read, never run: a fixed list of calls, and typed errors for everything else."""

import builtins
import os

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mage_jax.agent.calls import ToolCall
from mage_jax.data.adapters.base import AdapterError, Grid, Place
from mage_jax.data.adapters.code import CodeError, read_code

UNIT = Grid("unit", None)


def _read(code, *, grid=UNIT, dialect="pyautogui", scroll_per_click=100):
    calls = read_code(
        code, grid=grid, scroll_per_click=scroll_per_click, place=Place("s.jsonl", 4), field="code", dialect=dialect
    )
    return [call["arguments"] for call in calls]


def _click(x, y, action="click", **more):
    return {"action": action, "coordinate": [x, y], **more}


def _keys(*keys):
    return {"action": "keypress", "keys": list(keys)}


def _scroll(x, y, **more):
    return {"action": "scroll", "scroll_x": x, "scroll_y": y, **more}


READ = {
    "pyautogui.click(0.5, 0.25)": [_click(500, 250)],
    "import pyautogui, time\npyautogui.click(x=0.5, y=0.25, button='right', duration=0.3)": [
        _click(500, 250, button="right")
    ],
    "pyautogui.click((0.5, 0.25), button='primary')": [_click(500, 250)],
    "pyautogui.click(0.5, 0.25, clicks=2)": [_click(500, 250, "double_click")],
    "pyautogui.click(0.5, 0.25, 3)": [_click(500, 250, "triple_click")],
    "pyautogui.rightClick(1, 0)": [_click(999, 0, button="right")],
    "pyautogui.middleClick(1, 0)": [_click(999, 0, button="middle")],
    "pyautogui.doubleClick(0.1, 0.2, 0.1, 'left')": [_click(100, 200, "double_click")],
    "pyautogui.tripleClick(x=0.1, y=0.2)": [_click(100, 200, "triple_click")],
    "computer.triple_click(x=0.1, y=0.2)": [_click(100, 200, "triple_click")],
    "pyautogui.moveTo(0.1, 0.2); pyautogui.click()": [_click(100, 200, "move"), _click(100, 200)],
    "pyautogui.moveTo(0.1, 0.2)\npyautogui.dragTo(0.3, 0.4, duration=1.0, button='left')": [
        {"action": "drag", "start": [100, 200], "end": [300, 400]}
    ],
    "pyautogui.click(0.1, 0.2)\npyautogui.dragTo(0.3, 0.4)": [
        _click(100, 200),
        {"action": "drag", "start": [100, 200], "end": [300, 400]},
    ],
    "pyautogui.write('a\\n<é>', interval=0.1)": [{"action": "type", "text": "a\n<é>"}],
    "pyautogui.typewrite(message='''two\nlines''')": [{"action": "type", "text": "two\nlines"}],
    "pyautogui.press('enter', presses=2)": [_keys("enter"), _keys("enter")],
    "pyautogui.press(['a', 'b'])": [_keys("a"), _keys("b")],
    "pyautogui.hotkey('ctrl', 'shift', 't', interval=0.1)": [_keys("ctrl", "shift", "t")],
    "pyautogui.hotkey(['ctrl', 'c'])": [_keys("ctrl", "c")],
    "pyautogui.keyDown('ctrl')\npyautogui.press('c')\npyautogui.keyUp('ctrl')": [_keys("ctrl", "c")],
    "pyautogui.keyDown('ctrl'); pyautogui.keyDown('c'); pyautogui.keyUp('c'); pyautogui.keyUp('ctrl')": [
        _keys("ctrl", "c")
    ],
    "pyautogui.keyDown('alt')\npyautogui.press('tab', presses=2)\npyautogui.keyUp('alt')": [
        _keys("alt", "tab"),
        _keys("alt", "tab"),
    ],
    "pyautogui.keyDown('shift')\npyautogui.keyUp('shift')": [_keys("shift")],
    "pyautogui.scroll(-3)": [_scroll(0, -300)],
    "pyautogui.scroll(25, x=0.5, y=0.5)": [_scroll(0, step, coordinate=[500, 500]) for step in (999, 999, 502)],
    "pyautogui.hscroll(-0.001)": [_scroll(-1, 0)],
    "time.sleep(0.5)": [{"action": "wait", "time": 0.5}],
    "computer.wait()": [{"action": "wait", "time": 20.0}],
    "computer.terminate(status='failure')": [{"action": "terminate", "status": "failure"}],
    "# a comment\n\npyautogui.click(0, 0)  # here": [_click(0, 0)],
}


@pytest.mark.parametrize("code", READ)
def test_known_calls(code):
    assert _read(code) == READ[code]


def test_the_bare_dialect():
    assert _read("click(0.1, 0.2)\nwait(3)\nterminate('success')", dialect="bare") == [
        _click(100, 200),
        {"action": "wait", "time": 3},
        {"action": "terminate", "status": "success"},
    ]
    for code, dialect in (("pyautogui.click(0.1, 0.2)", "bare"), ("click(0.1, 0.2)", "pyautogui")):
        with pytest.raises(CodeError, match="is not a known call"):
            _read(code, dialect=dialect)


def test_pixels_are_of_the_screenshot():
    assert _read("pyautogui.click(1919, 540.7)", grid=Grid("pixel", (1920, 1080))) == [_click(999, 500)]
    with pytest.raises(AdapterError, match=r"^s\.jsonl:4: code: code line 1: pyautogui\.click\.x: 1920 is outside"):
        _read("pyautogui.click(1920, 540)", grid=Grid("pixel", (1920, 1080)))


REFUSED = {
    "": "code line 1: code: does nothing",
    "import pyautogui": "code: does nothing",
    "import os": "code line 1: Import: only calls",
    "import time as pyautogui": "Import: only calls",
    "from pyautogui import click": "ImportFrom: only calls",
    "x = 1": "Assign: only calls",
    "for i in range(3):\n  pyautogui.click(0, 0)": "For: only calls",
    "pyautogui.click(0, 0)\nos.system('ls')": "code line 2: os.system: is not a known call",
    "__import__('os').system('ls')": "code line 1: Attribute: is not a known call",
    "pyautogui.alert('x')": "pyautogui.alert: is not a known call",
    "pyautogui.mouseDown()": "pyautogui.mouseDown: is not a known call",
    "pyautogui.click(": "code line 1: code: is not Python",
    "pyautogui.click(x, y)": "pyautogui.click: arguments must be literal",
    "pyautogui.write(f'{1}')": "pyautogui.write: arguments must be literal",
    "pyautogui.write(open('f').read())": "arguments must be literal",
    "pyautogui.click(*[0, 0])": "without \\* and \\*\\*",
    "pyautogui.click(**{})": "without \\* and \\*\\*",
    "pyautogui.click()": "pyautogui.click: has no position",
    "pyautogui.dragTo(0.1, 0.1)": "pyautogui.dragTo: has no position",
    "pyautogui.moveTo()": "pyautogui.moveTo: has no position",
    "pyautogui.click('ok.png')": "pyautogui.click.x: must be a finite number",
    "pyautogui.click(True, 0)": "pyautogui.click.x: must be a finite number",
    "pyautogui.click(0.5)": "pyautogui.click.y: must be a finite number",
    "pyautogui.click(1e999, 0)": "pyautogui.click.x: must be a finite number",
    "pyautogui.click(0, 0, clicks=4)": "4 clicks of button 'left' have no equal",
    "pyautogui.click(0, 0, clicks=2, button='right')": "2 clicks of button 'right' have no equal",
    "pyautogui.click(0, 0, button='back')": "button: must be one of",
    "pyautogui.click(0, 0, colour=1)": "takes no argument colour",
    "pyautogui.click(0, 0, x=1)": "takes no argument x",
    "pyautogui.write('')": "message must be a non-empty string",
    "pyautogui.write(5)": "message must be a non-empty string",
    "pyautogui.press('nonsense')": "unknown key 'nonsense'",
    "pyautogui.press('a', presses=0)": "presses must be in",
    "pyautogui.press('a', presses=16)": "presses must be in",
    "pyautogui.hotkey()": "has no keys",
    "pyautogui.keyDown('ctrl')": "ctrl is never released",
    "pyautogui.keyUp('ctrl')": "'ctrl' is not held",
    "pyautogui.keyDown('ctrl'); pyautogui.keyDown('ctrl')": "'ctrl' is already held",
    "pyautogui.keyDown('ctrl'); pyautogui.click(0, 0); pyautogui.keyUp('ctrl')": "happens while ctrl is held",
    "pyautogui.moveTo(0, 0); pyautogui.dragTo(1, 1, button='right')": "dragging with button 'right'",
    "pyautogui.scroll(0)": "scrolls 0",
    "pyautogui.scroll(10**3)": "arguments must be literal",
    "pyautogui.scroll(1000)": "scrolls 100000",
    "pyautogui.scroll()": "clicks must be a number",
    "time.sleep(-1)": "time: must be seconds",
    "time.sleep()": "seconds must be a number",
    "computer.terminate()": "status must be",
    "computer.terminate(status='done')": "status must be",
    "pyautogui.press('a')\n" * 16: "code line 16: pyautogui.press: more than 15 calls",
    "#" * 20_001: "has 20001 characters",
    "\0": "is not Python",
    "(" * 5000: "is not Python",
    "-" * 10_000 + "1": "(is not Python|only calls)",
}


@pytest.mark.parametrize("code", REFUSED, ids=lambda code: repr(code[:40]))
def test_everything_else_is_an_error_that_names_call_and_line(code):
    with pytest.raises(AdapterError, match=r"^s\.jsonl:4: code: code line \d+: .*") as caught:
        _read(code)
    with pytest.raises(AdapterError, match=REFUSED[code]):
        raise caught.value


# Properties

ARGUMENTS = (
    "0 0.5 1 -1 1.5 1e999 10**9 99999999999999999999 None True 'a' 'ctrl' '' 'enter' [0.1,0.2] ['a'] (1,2) {} x "
    "f'{x}' x=0.5 y=0.5 clicks=2 clicks=-3 button='right' keys='a' presses=3 message='m' status='success' seconds=1 "
    "key='a' *a **b '\\ud800' b'x' 1j print(1) (lambda:1)() open('f') __import__('os').system('touch_me')"
)
NAMES = (
    "pyautogui.click pyautogui.doubleClick pyautogui.moveTo pyautogui.dragTo pyautogui.write pyautogui.press "
    "pyautogui.hotkey pyautogui.keyDown pyautogui.keyUp pyautogui.scroll pyautogui.hscroll time.sleep "
    "computer.terminate computer.wait os.system eval exec print pyautogui.screenshot a.b.c"
)
_STATEMENTS = st.builds(
    lambda name, arguments: f"{name}({', '.join(arguments)})",
    st.sampled_from(NAMES.split()),
    st.lists(st.sampled_from(ARGUMENTS.split()), max_size=3),
)
_CODE = st.lists(_STATEMENTS, min_size=1, max_size=4).map("\n".join)


def _valid_or_adapter_error(code):
    try:
        calls = read_code(code, grid=UNIT, scroll_per_click=100, place=Place("s.jsonl", 4), field="code")
    except AdapterError as error:
        assert str(error).startswith("s.jsonl:4: code: code line ")
        return
    assert 1 <= len(calls) <= 15
    for call in calls:
        ToolCall.from_arguments(call["name"], call["arguments"])


@given(_CODE)
@example("__import__('os').system('touch_me')")
@example("print(open('f'))")
@settings(deadline=None, max_examples=300)
def test_random_calls_are_read_or_refused_and_never_run(code):
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((os, "system"), (builtins, "eval"), (builtins, "exec"), (builtins, "print")):
            patch.setattr(module, name, lambda *a, **k: pytest.fail("foreign code ran"))
        _valid_or_adapter_error(code)


@given(st.text(max_size=80) | st.text("pyautogi.click()0123456789,'\n=[]{}\\\"#; ", max_size=60))
@settings(deadline=None, max_examples=300)
def test_random_text_is_refused(code):
    _valid_or_adapter_error(code)
