"""Random valid calls and turns, shared by the tests of the agent protocol."""

from hypothesis import strategies as st

from mage_jax.agent.calls import BUTTONS, MAX_CALLS, STATUSES, ToolCall
from mage_jax.agent.keys import KEYS

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
# Texts that try to end a block, a thought or a string early.
EVIL = st.lists(
    st.sampled_from(
        [
            "</tool_call>",
            "<tool_call>",
            "</think>",
            "<think>",
            "Action: ",
            '"',
            "\\",
            "{",
            "}",
            "\n",
            "a",
            "é",
            "\u2028",
        ]
    ),
    max_size=8,
).map("".join)
STRINGS = TEXT | EVIL
POINTS = st.tuples(st.integers(0, 999), st.integers(0, 999))
SCROLLS = st.integers(-999, 999) | st.floats(-999, 999)
SECONDS = st.integers(0, 10**6) | st.floats(0, 1e6)


def _call(action, **arguments):
    return st.builds(ToolCall, name=st.just("computer_use"), action=st.just(action), **arguments)


GUI_CALLS = st.one_of(
    _call("click", coordinate=POINTS, button=st.none() | st.sampled_from(BUTTONS)),
    _call("double_click", coordinate=POINTS),
    _call("triple_click", coordinate=POINTS),
    _call("move", coordinate=POINTS),
    _call("drag", start=POINTS, end=POINTS),
    _call("type", text=STRINGS),
    _call("keypress", keys=st.lists(st.sampled_from(sorted(KEYS)), min_size=1, max_size=4).map(tuple)),
    _call("scroll", scroll_x=SCROLLS, scroll_y=SCROLLS, coordinate=st.none() | POINTS),
    _call("wait", time=SECONDS),
    _call("screenshot"),
    _call("terminate", status=st.sampled_from(STATUSES), msg_to_user=st.none() | STRINGS),
)
BASH_CALLS = st.builds(ToolCall, name=st.just("bash"), command=STRINGS)
THOUGHTS = STRINGS.filter(lambda text: "</think>" not in text)
ACTIONS = TEXT.map(lambda text: " ".join(text.split())).filter(bool)
TURNS = st.fixed_dictionaries(
    {
        "think": THOUGHTS,
        "action": ACTIONS,
        "calls": st.one_of(
            st.lists(calls, min_size=1, max_size=MAX_CALLS).map(tuple) for calls in (GUI_CALLS, BASH_CALLS)
        ),
    }
)
