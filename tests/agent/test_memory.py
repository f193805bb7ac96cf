"""Working memory: golden windows of three episodes in both readings, and its book-keeping for any episode."""

import itertools
import os
import pathlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mage_jax.agent.memory import FOLDINGS, MemoryConfig, PastTurn, WindowError, build_window
from mage_jax.agent.parser import parse
from mage_jax.agent.prompt import load_system_prompt
from mage_jax.agent.render import render
from mage_jax.agent.tokenizer import Tokenizer
from tests.agent.episodes import EPISODES, FIRST, TASK, bash, gui

TOY = Tokenizer.load("toy")
GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "memory"
CONFIGS = {folding: MemoryConfig(folding=folding) for folding in FOLDINGS}


def window(turns, config=CONFIGS["per_turn"], **changes):
    arguments = {"first_screenshot": FIRST, "system_prompt": "SYSTEM", "config": config, **changes}
    return build_window(TASK, turns=turns, **arguments)


def readable(window):
    """The prompt as the model reads it, each image with its name."""
    rendered = render(
        window.messages,
        tokenizer=TOY,
        image_token_counts=[1] * len(window.screenshots),
        add_generation_prompt=True,
        default_system=None,
    )
    text = TOY.decode(rendered.tokens)
    names = iter(window.screenshots)
    text = re.sub(re.escape("<|image_pad|>"), lambda _: f"[{next(names)}]", text)
    assert next(names, None) is None
    numbers = {name: " ".join(map(str, getattr(window, name))) or "-" for name in ("folded", "retained", "shots")}
    head = " | ".join([f"turn {window.turn}", *(f"{k} {v}" for k, v in numbers.items())])
    return f"######## {head}\n{text}\n"


def golden_text(episode, config):
    turns = EPISODES[episode]
    return "\n".join(readable(window(turns[:past], config)) for past in range(len(turns) + 1))


@pytest.mark.parametrize("folding", FOLDINGS)
@pytest.mark.parametrize("episode", EPISODES)
def test_goldens(episode, folding):
    path = GOLDEN / f"{episode}_{folding}.txt"
    text = golden_text(episode, CONFIGS[folding])
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("folding", FOLDINGS)
def test_the_goldens_see_a_fold_that_is_off_by_one(monkeypatch, folding, by):
    right = MemoryConfig.folded_turns
    monkeypatch.setattr(
        MemoryConfig, "folded_turns", lambda self, past: min(past, max(0, right(self, past + by) if past else 0))
    )
    for episode in EPISODES:
        assert golden_text(episode, CONFIGS[folding]) != (GOLDEN / f"{episode}_{folding}.txt").read_text()


def test_the_two_readings_differ():
    for episode in EPISODES:
        assert len({(GOLDEN / f"{episode}_{folding}.txt").read_text() for folding in FOLDINGS}) == 2


def _shape(window):
    """The protocol's own notation: the texts and screenshots of each message."""
    items = []
    shots = iter(window.shots)
    for message in window.messages[1:]:
        if message["role"] == "assistant":
            items.append(int(re.search(r"Thought (\d+)", message["content"])[1]))
        else:
            items.append([i.get("text") or next(shots) for i in message["content"]])
    return items


TASK_LINE = f"Task: {TASK}"


def test_the_examples_of_the_protocol():
    turns = EPISODES["gui"]
    assert _shape(window([])) == [[1, TASK_LINE]]
    assert _shape(window(turns[:3])) == [[TASK_LINE], 1, [2], 2, [3], 3, [4]]
    folded = f"{TASK_LINE}\nPrevious actions:\nStep 1: Click 1."
    assert _shape(window(turns[:4])) == [[folded], 2, [3], 3, [4], 4, [5]]
    assert window([]).messages[0] == {"role": "system", "content": "SYSTEM"}


def test_bash_uses_no_image_slot():
    output = "<tool_response>\nout 2\n\n</tool_response>"
    assert _shape(window([gui(1), bash(2), gui(3)])) == [[1, TASK_LINE], 1, [2], 2, [output], 3, [4]]


def test_the_view_of_the_oldest_kept_response():
    turns = EPISODES["mixed"]
    keep = MemoryConfig(keep_opening_view=True)
    assert [window(turns[:past], keep).shots for past in range(8)] == [
        *[(1,), (1, 2), (1, 2), (1, 2, 4)],  # nothing folded: no difference
        (2, 4),  # turn 5: screen 2 answered the folded turn 1, and response 2 acted on it
        (2, 4),  # turn 6: response 3 acted on it as well
        (4,),
        (4, 8),
    ]
    for past in range(8):
        assert window(EPISODES["gui"][:past], keep) == window(EPISODES["gui"][:past])


def test_several_commands_are_answered_once_in_order():
    answer = window([bash(1, ("a", "", "</tool_response>"))]).messages[-1]
    assert answer == {
        "role": "user",
        "content": [
            {
                "type": "text",
                "text": "<tool_response>\na\n</tool_response>\n<tool_response>\n\n</tool_response>\n"
                "<tool_response>\n</tool_response>\n</tool_response>",
            }
        ],
    }


def test_pairwise_changes_the_first_user_turn_every_second_turn():
    turns = [gui(i) for i in range(1, 13)]
    windows = [window(turns[:past], CONFIGS["pairwise"]) for past in range(4, 13)]
    assert [len(w.folded) for w in windows] == [0, 2, 2, 4, 4, 6, 6, 8, 8]
    assert {len(w.retained) for w in windows} == {3, 4}
    # The oldest of four kept turns is beyond the three screenshots.
    assert _shape(windows[2]) [1:] == [3, ["(screenshot omitted)"], 4, [5], 5, [6], 6, [7]]  # fmt: skip


CHANNELS = st.lists(st.booleans(), max_size=14)
ANY_CONFIG = st.builds(
    MemoryConfig,
    history_n=st.integers(1, 5),
    images_to_keep=st.integers(1, 5),
    folding=st.sampled_from(FOLDINGS),
    keep_opening_view=st.booleans(),
)


@given(CHANNELS, ANY_CONFIG)
def test_book_keeping(is_gui, config):
    turns = [gui(i) if g else bash(i) for i, g in enumerate(is_gui, 1)]
    w = window(turns, config)
    assert w.turn == len(turns) + 1
    # No turn is lost or stands twice, and the order is kept.
    assert [*w.folded, *w.retained] == list(range(1, w.turn))
    assert len(w.retained) >= min(config.history_n, len(turns))
    assert len(w.retained) <= config.history_n + (config.folding == "pairwise")
    assistant = [m["content"] for m in w.messages if m["role"] == "assistant"]
    assert assistant == [turns[n - 1].response for n in w.retained]
    opening = w.messages[1]["content"][-1]["text"]
    steps = [f"Step {n}: {turns[n - 1].action}" for n in w.folded]
    assert opening == "\n".join([TASK_LINE, *(["Previous actions:"] if steps else []), *steps])
    # Roles alternate, so each response is answered once.
    roles = [m["role"] for m in w.messages]
    assert roles == ["system", "user", *["assistant", "user"] * len(w.retained)]
    # Screenshots: the newest is there, never too many, in order, and one per image item.
    all_shots = [1, *(n + 1 for n, g in enumerate(is_gui, 1) if g)]
    assert 1 <= len(w.shots) <= config.images_to_keep
    assert w.shots[-1] == all_shots[-1]
    # A run of the screenshots without a gap: nothing older stays where a newer one went.
    assert list(w.shots) == all_shots[-len(w.shots) :]
    assert w.screenshots == tuple(f"screen{n}" for n in w.shots)
    images = [i for m in w.messages if m["role"] == "user" for i in m["content"] if i["type"] == "image"]
    assert len(images) == len(w.shots)
    # Every output of a kept bash turn is there, once.
    text = readable(w)
    for n, g in enumerate(is_gui, 1):
        assert text.count(f"\nout {n}\n") == (not g and n in w.retained)


@given(CHANNELS, ANY_CONFIG)
def test_a_window_grows_only_from_its_own_past(is_gui, config):
    turns = [gui(i) if g else bash(i) for i, g in enumerate(is_gui, 1)]
    for a, b in itertools.pairwise(window(turns[:past], config) for past in range(len(turns) + 1)):
        assert set(a.folded) <= set(b.folded)
        assert set(b.shots) <= set(a.shots) | {b.turn}


def test_prefixes_hold_until_the_first_fold():
    """Turns 1 to 4 extend each other token by token as long as no screenshot leaves the window."""
    turns = [gui(1), bash(2), gui(3)]
    texts = [readable(window(turns[:past])).split("\n", 1)[1].rstrip("\n") for past in range(4)]
    assert all(b.startswith(a) for a, b in itertools.pairwise(texts))


def test_a_parsed_turn_fits():
    turn = parse(gui(1).response)
    past = PastTurn(response=turn.raw, action=turn.action, channel=turn.channel, screenshot="screen2")
    assert past == gui(1)


def test_with_the_shipped_prompt():
    rendered = render(window([], system_prompt=load_system_prompt()).messages, tokenizer=TOY, image_token_counts=[3])
    text = TOY.decode(rendered.tokens)
    assert "use action=terminate.<|im_end|>\n<|im_start|>user\n<|vision_start|>" in text
    assert text.endswith("<|vision_end|>Task: Merge the files\nand save.<|im_end|>\n")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: MemoryConfig(history_n=0), "history_n"),
        (lambda: MemoryConfig(images_to_keep=0), "images_to_keep"),
        (lambda: MemoryConfig(images_to_keep=True), "images_to_keep"),
        (lambda: MemoryConfig(folding="pairs"), "per_turn, pairwise"),
        (lambda: MemoryConfig(omitted_screenshot=""), "omitted_screenshot"),
        (lambda: PastTurn(response="r", action="a", channel="gui", screenshot=1), "channel"),
        (lambda: PastTurn(response="r", action="a\nb", channel="computer_use", screenshot=1), "action"),
        (lambda: PastTurn(response="r", action=" ", channel="computer_use", screenshot=1), "action"),
        (lambda: PastTurn(response="r", action="a", channel="computer_use"), "screenshot"),
        (lambda: PastTurn(response="r", action="a", channel="bash", screenshot=1, outputs=("x",)), "screenshot"),
        (lambda: PastTurn(response="r", action="a", channel="bash"), "outputs"),
        (lambda: PastTurn(response="r", action="a", channel="bash", outputs="x"), "outputs"),
        (lambda: PastTurn(response="r", action="a", channel="computer_use", screenshot=1, outputs=("x",)), "outputs"),
        (lambda: window([], first_screenshot=None), "first_screenshot"),
    ],
)
def test_bad_input(make, reason):
    with pytest.raises(WindowError, match=reason):
        make()
