"""Key names."""

import pytest

from mage_jax.agent.errors import ProtocolError, UnknownKey
from mage_jax.agent.keys import ALIASES, KEYS, canonical_key, canonical_keys


@pytest.mark.parametrize("keys", [["ctrl", "c"], ["ctrl+c"], "ctrl+c", ["Control_L+c"], "Control+c"])
def test_spellings_of_a_combination(keys):
    assert canonical_keys(keys)[-1] == "c" and canonical_keys(keys)[0] in ("ctrl", "ctrlleft")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("Return", "enter"),
        ("KP_Enter", "enter"),
        ("BackSpace", "backspace"),
        ("Page_Down", "pagedown"),
        ("page_up", "pageup"),
        ("ArrowUp", "up"),
        ("Escape", "esc"),
        ("cmd", "winleft"),
        ("super", "winleft"),
        ("meta", "winleft"),
        ("option", "alt"),
        ("F12", "f12"),
        ("ENTER", "enter"),
        ("A", "A"),
        ("a", "a"),
        ("-", "-"),
        ("_", "_"),
        (" ", "space"),
        ("\n", "enter"),
        ("Control_L", "ctrlleft"),
    ],
)
def test_aliases(name, key):
    assert canonical_key(name) == key


def test_plus_is_a_key_too():
    assert canonical_keys(["+"]) == canonical_keys("+") == ("+",)
    assert canonical_keys("ctrl++") == canonical_keys(["ctrl", "+"]) == ("ctrl", "+")
    assert canonical_keys("ctrl+shift++") == ("ctrl", "shift", "+")


@pytest.mark.parametrize("name", ["ctrll+x", "f25", "é", "你", "", "+c", "ctrl+", "-a", "--", "hello", "++", "\x00"])
def test_an_unknown_key_is_named(name):
    with pytest.raises(UnknownKey, match="unknown key") as caught:
        canonical_keys([name])
    assert isinstance(caught.value, ProtocolError)
    assert repr(name) in str(caught.value) or repr(name.split("+")[0]) in str(caught.value)


def test_the_tables_are_consistent():
    assert set(ALIASES.values()) <= KEYS
    assert not set(ALIASES) & KEYS, "an alias of a canonical name would hide it"
    assert all(canonical_key(key) == key for key in KEYS)
