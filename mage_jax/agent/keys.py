"""Key names: what models write (X11 keysyms, browser names, Mac names) to one canonical set.

The canonical names are pyautogui's, and only those that its X11 back-end maps: a name that it does not map is ignored
there without a word, so an unknown name is an error here, before anything is pressed.
"""

from __future__ import annotations

from collections.abc import Sequence

from mage_jax.agent.errors import UnknownKey

_NAMED = (
    "alt altleft altright backspace capslock ctrl ctrlleft ctrlright delete down end enter esc home insert left "
    "numlock pagedown pageup pause printscreen right scrolllock shift shiftleft shiftright space tab up winleft "
    "winright apps add subtract multiply divide decimal separator"
)
FUNCTION_KEYS = tuple(f"f{i}" for i in range(1, 25))
NUMBER_PAD = tuple(f"num{i}" for i in range(10))
CHARACTERS = tuple(chr(c) for c in range(0x21, 0x7F))
KEYS = frozenset((*_NAMED.split(), *FUNCTION_KEYS, *NUMBER_PAD, *CHARACTERS))

# Looked up in lower case, with "-", "_" and spaces taken out of names of more than one character.
ALIASES = {
    "control": "ctrl",
    "controll": "ctrlleft",  # Control_L
    "controlr": "ctrlright",
    "controlleft": "ctrlleft",
    "controlright": "ctrlright",
    "lctrl": "ctrlleft",
    "rctrl": "ctrlright",
    "shiftl": "shiftleft",
    "shiftr": "shiftright",
    "lshift": "shiftleft",
    "rshift": "shiftright",
    "altl": "altleft",
    "altr": "altright",
    "lalt": "altleft",
    "ralt": "altright",
    "option": "alt",
    "optionleft": "altleft",
    "optionright": "altright",
    # One decision for every Mac and desktop name: the machine is Linux, so these are its Super key, never ctrl.
    "win": "winleft",
    "windows": "winleft",
    "super": "winleft",
    "superl": "winleft",
    "superr": "winright",
    "meta": "winleft",
    "metaleft": "winleft",
    "metaright": "winright",
    "metal": "winleft",
    "metar": "winright",
    "cmd": "winleft",
    "command": "winleft",
    "return": "enter",
    "kpenter": "enter",
    "escape": "esc",
    "del": "delete",
    "kpdelete": "delete",
    "ins": "insert",
    "pgup": "pageup",
    "pgdn": "pagedown",
    "pgdown": "pagedown",
    "prior": "pageup",
    "next": "pagedown",
    "arrowup": "up",
    "arrowdown": "down",
    "arrowleft": "left",
    "arrowright": "right",
    "uparrow": "up",
    "downarrow": "down",
    "leftarrow": "left",
    "rightarrow": "right",
    "spacebar": "space",
    "caps": "capslock",
    "print": "printscreen",
    "prntscrn": "printscreen",
    "prtsc": "printscreen",
    "prtscr": "printscreen",
    "printscrn": "printscreen",
    "snapshot": "printscreen",
    "menu": "apps",
    "contextmenu": "apps",
    "kpadd": "add",
    "kpsubtract": "subtract",
    "kpmultiply": "multiply",
    "kpdivide": "divide",
    "kpdecimal": "decimal",
    **{f"kp{i}": f"num{i}" for i in range(10)},
    # X11 names of characters
    "plus": "+",
    "minus": "-",
    "equal": "=",
    "comma": ",",
    "period": ".",
    "slash": "/",
    "backslash": "\\",
    "semicolon": ";",
    "colon": ":",
    "apostrophe": "'",
    "quotedbl": '"',
    "grave": "`",
    "bracketleft": "[",
    "bracketright": "]",
    "braceleft": "{",
    "braceright": "}",
    "parenleft": "(",
    "parenright": ")",
    "less": "<",
    "greater": ">",
    "question": "?",
    "exclam": "!",
    "at": "@",
    "numbersign": "#",
    "dollar": "$",
    "percent": "%",
    "asciicircum": "^",
    "ampersand": "&",
    "asterisk": "*",
    "underscore": "_",
    "bar": "|",
    "asciitilde": "~",
}
_CONTROL_CHARACTERS = {" ": "space", "\n": "enter", "\r": "enter", "\t": "tab", "\b": "backspace", "\x1b": "esc"}
_SEPARATORS = str.maketrans("", "", "-_ ")


def canonical_key(name: str) -> str:
    """The canonical name of one key. One character stays as it is: "A" is shift and a.

    Raises:
      UnknownKey: names the key.
    """
    if len(name) == 1:
        key = _CONTROL_CHARACTERS.get(name, name)
    else:
        plain = name.lower().translate(_SEPARATORS)
        key = ALIASES.get(plain, plain)
        if len(key) == 1 and plain not in ALIASES:  # "-a" is no way to write "a"
            key = name
    if key not in KEYS:
        raise UnknownKey(f"unknown key {name!r}")
    return key


def split_combination(text: str) -> list[str]:
    """The parts of "ctrl+c". "+" alone, and at the end of "ctrl++", is the key itself.

    Raises:
      UnknownKey: nothing stands beside a "+".
    """
    if len(text) <= 1:
        parts = [text]
    elif text.endswith("++"):
        parts = [*text[:-2].split("+"), "+"]
    else:
        parts = text.split("+")
    if "" in parts:
        raise UnknownKey(f"unknown key {text!r}: a part is empty")
    return parts


def canonical_keys(keys: Sequence[str] | str) -> tuple[str, ...]:
    """Canonical names in pressing order. ``["ctrl", "c"]``, ``["ctrl+c"]`` and ``"ctrl+c"`` are equal.

    Raises:
      UnknownKey: names the first key that no table knows.
    """
    listed = [keys] if isinstance(keys, str) else keys
    return tuple(canonical_key(part) for text in listed for part in split_combination(text))
