"""Tasks and episodes: what is written is read back, and nothing else is."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mage_jax.data import strict_json
from mage_jax.data.episode_schema import (
    Asset,
    Call,
    EnvSpec,
    Episode,
    Observation,
    Outcome,
    Parsed,
    Part,
    PromptImage,
    Sampled,
    SamplerSpec,
    SetupStep,
    Source,
    StoredImage,
    TaskSpec,
    Turn,
    TurnError,
    VerifierSpec,
    Versions,
    Window,
)
from mage_jax.data.episodes import EpisodeError, dump, parse_episode, parse_task, read_episodes, write_episodes
from mage_jax.data.image_store import ImageStore, ImageStoreError

SHA = "ab" * 32
IMAGE = StoredImage(sha256=SHA, width=200, height=100)
SHOT = Observation(kind="screenshot", parts=(Part(image=IMAGE),), seconds=3.0)
PAD = 9

SAMPLED = Sampled(
    prompt_ids=(1, 2, PAD, PAD, 3),
    gen_ids=(5, 6, 7),
    gen_logp=(-0.1, 0.0, -17.25),
    gen_version=(4, 4, 5),
    sampler=SamplerSpec(temperature=1.0, top_p=1.0, top_k=0, seed=11, max_new_tokens=4096),
    images=(PromptImage(sha256=SHA, width=200, height=100, grid=(1, 4, 2), token_span=(2, 4)),),
    window=Window(folded=(), full=(), shots=(0,)),
    finish="stop",
    queue_s=0.5,
    gen_s=1.25,
)
CLICK = Call(name="computer_use", arguments={"action": "click", "coordinate": [1, 999]})
TURN = Turn(
    index=1,
    channel="computer_use",
    text="<think>\n…\n</think>",
    parsed=Parsed(think="…", action="Click.", calls=(CLICK,)),
    results=(SHOT,),
    sampled=SAMPLED,
)
REJECTED = Turn(
    index=1,
    accepted=False,
    channel="none",
    text="",
    parsed=None,
    error=TurnError(kind="NoCall", message="no call"),
)
EPISODE = Episode(
    run_id="run-1",
    created_ns=1,
    episode_id="e",
    task_id="t",
    group_id="g",
    seed=3,
    source=Source(format="rollout", name="toy", place="host:1", licence="Apache-2.0"),
    prompt="agent",
    instruction="Click the box.",
    coord_space="thousand",
    screen=(200, 100),
    initial=(SHOT,),
    turns=(REJECTED, dataclasses.replace(TURN, attempt=1), dataclasses.replace(TURN, index=2)),
    outcome=Outcome(kind="success"),
    reward=1.0,
    versions=Versions(start=4, min=4, max=5),
    timing={"env_s": 2.0},
    labels={"difficulty": 3, "tags": ["a", None, {"b": 1.5}]},
)
TASK = TaskSpec(
    run_id="run-1",
    created_ns=0,
    task_id="t",
    source="hand",
    licence="Apache-2.0",
    domain="os",
    instruction="Make a file.",
    env=EnvSpec(rung="desktop", screen=(1920, 1080)),
    setup=(SetupStep(type="launch", parameters={"command": ["xterm"]}),),
    assets=(Asset(path="a.txt", sha256=SHA, bytes=3),),
    verifier=VerifierSpec(kind="program", entry="check", params={"path": "/a"}),
    channels=("computer_use", "bash"),
    oracle_ref="oracle.sh",
    split="rl",
)


def _parse(line, **options):
    return parse_episode(line, source_file="e.jsonl", line=7, **options)


def test_round_trip_keeps_everything():
    assert _parse(dump(EPISODE)) == EPISODE
    assert _parse(dump(EPISODE), image_pad_id=PAD) == EPISODE
    assert parse_task(dump(TASK), source_file="t.jsonl", line=1) == TASK
    assert EPISODE.n_calls == 2 and EPISODE.n_tokens == 6 and EPISODE.image_hashes() == {SHA}


def test_files_appear_whole_and_read_back(tmp_path):
    path = tmp_path / "e.jsonl"
    other = dataclasses.replace(EPISODE, episode_id="f")
    assert write_episodes(path, [EPISODE, other]) == 2
    assert list(read_episodes(path)) == [EPISODE, other]

    broken = dataclasses.replace(EPISODE, reward=None)
    with pytest.raises(EpisodeError, match="reward"):
        write_episodes(path, [EPISODE, broken])
    assert list(read_episodes(path)) == [EPISODE, other]
    assert [p.name for p in tmp_path.iterdir()] == ["e.jsonl"]
    with pytest.raises(EpisodeError, match=r"none\.jsonl:1: line: cannot be read"):
        list(read_episodes(tmp_path / "none.jsonl"))


def _changed(path, value, *, drop=False):
    """EPISODE as JSON with one field changed; ``path`` is dotted, with numbers for list items."""
    data = strict_json.encode(EPISODE)
    *parents, last = path.split(".")
    at = data
    for name in parents:
        at = at[int(name)] if isinstance(at, list) else at[name]
    if drop:
        del at[last]
    else:
        at[int(last) if isinstance(at, list) else last] = value
    return json.dumps(data)


BAD = [
    ("extra", 1, "extra: unknown field"),
    ("turns.1.sampled.extra", 1, r"turns\[1\]\.sampled\.extra: unknown field"),
    ("format_version", 2, "format_version: is 2; this code reads 1"),
    ("format_version", True, "format_version: is True"),
    ("created_ns", 1.5, "created_ns: must be int, got float"),
    ("turns.1.attempt", True, r"turns\[1\]\.attempt: must be int, got bool"),
    ("episode_id", None, "episode_id: must be str, got null"),
    ("episode_id", "", "episode_id: is empty"),
    ("prompt", "browser", "prompt: must be one of agent, grounding, chat"),
    ("turns", {}, "turns: must be a list"),
    ("turns.0", [], r"turns\[0\]: must be an object"),
    ("screen", [1], "screen: must have 2 items"),
    ("screen", [0, 5], "screen: width and height must be positive"),
    ("labels.x", float("inf"), "line: is not JSON .*Infinity"),
    ("labels.x", "\ud800", r"labels\.x: holds a lone surrogate"),
    ("timing.x", "1", r"timing\.x: must be float, got str"),
    ("instruction", " ", "instruction: is empty exactly for a chat"),
    ("turns.1.sampled.gen_logp", [-1.0], r"turns\[1\]\.sampled\.gen_logp: has 1 entries for 3 gen_ids"),
    ("turns.1.sampled.gen_version", [], r"turns\[1\]\.sampled\.gen_version: has 0 entries"),
    ("turns.1.sampled.gen_logp.0", 0.5, r"turns\[1\]\.sampled\.gen_logp: a log-probability is at most 0"),
    ("turns.1.sampled.gen_ids.0", -1, r"turns\[1\]\.sampled\.gen_ids: must lie in"),
    ("turns.1.sampled.gen_ids.0", 2**31, r"turns\[1\]\.sampled\.gen_ids: must lie in"),
    ("turns.1.sampled.gen_ids.0", "5", r"turns\[1\]\.sampled\.gen_ids\[0\]: must be int"),
    ("turns.1.sampled.images.0.token_span", [4, 9], r"sampled\.images\[0\]\.token_span: "),
    ("turns.1.sampled.images.0.token_span", [2, 2], r"sampled\.images\[0\]\.token_span: "),
    ("turns.1.sampled.images.0.sha256", "AB" * 32, r"sampled\.images\[0\]\.sha256: is not a sha256"),
    ("turns.1.index", 3, r"turns\[1\]\.index: turn 3 attempt 1 cannot stand here; expected \(2, 0\) or \(1, 1\)"),
    ("turns.2.index", 1, r"turns\[2\]\.index: turn 1 attempt 0 cannot stand here; expected \(2, 0\)"),
    ("turns.0.accepted", True, r"turns\[0\]\.accepted: a turn that could not be read"),
    ("turns.1.parsed", None, r"turns\[1\]\.parsed: exactly one"),
    ("turns.1.channel", "bash", r"turns\[1\]\.channel: is bash, but the turn calls computer_use"),
    (
        "turns.1.parsed.calls.0.arguments.coordinate",
        [1500, 0],
        r"turns\[1\]\.parsed\.calls\[0\]: coordinate: must be in",
    ),
    ("turns.1.parsed.calls.0.arguments.action", "poke", r"turns\[1\]\.parsed\.calls\[0\]: unknown action"),
    ("turns.1.results.0.parts", [], r"turns\[1\]\.results\[0\]\.parts: a screenshot is one picture"),
    ("turns.1.results.0.kind", "output", r"turns\[1\]\.results\[0\]\.parts: an output is one text"),
    ("turns.1.results.0.parts.0.text", "x", r"turns\[1\]\.results\[0\]\.parts\[0\]: exactly one"),
    ("turns.1.results.0.seconds", -1, r"turns\[1\]\.results\[0\]\.seconds: must not be negative"),
    ("outcome.kind", "env_fail", "reward: must be null exactly for"),
    ("reward", None, "reward: must be null exactly for"),
    ("versions", None, "versions: is null, but turns were sampled"),
    ("versions.min", 3, "versions: says 3 to 5; the tokens' versions: 4 to 5"),
]


@pytest.mark.parametrize(("path", "value", "reason"), BAD, ids=lambda v: str(v)[:40])
def test_every_fault_names_place_and_field(path, value, reason):
    with pytest.raises(EpisodeError, match=r"^e\.jsonl:7: .*" + reason):
        _parse(_changed(path, value))


def test_every_missing_field_is_named():
    for name in strict_json.encode(EPISODE):
        with pytest.raises(EpisodeError, match=rf"^e\.jsonl:7: {name}: is missing"):
            _parse(_changed(name, None, drop=True))
    with pytest.raises(EpisodeError, match=r"e\.jsonl:7: turns\[1\]\.sampled\.window\.full: is missing"):
        _parse(_changed("turns.1.sampled.window.full", None, drop=True))
    with pytest.raises(EpisodeError, match=r"e\.jsonl:7: format_version: is missing"):
        _parse(_changed("format_version", None, drop=True))


@pytest.mark.parametrize("raw", [b"", b" \n", b"{", b"\xff", b"[]", b"[" * 100_000, b'{"a": 1, "a": 2}', b"1" * 5000])
def test_lines_that_are_no_struct(raw):
    with pytest.raises(EpisodeError, match=r"^e\.jsonl:7: line: "):
        _parse(raw)


def test_image_pads_must_be_those_of_the_images():
    with pytest.raises(EpisodeError, match=r"token_span: covers tokens other than image_pad 8"):
        _parse(dump(EPISODE), image_pad_id=8)
    with pytest.raises(EpisodeError, match=r"images: cover 2 tokens, but the prompt has 3 image_pad"):
        _parse(_changed("turns.1.sampled.prompt_ids", [PAD, 2, PAD, PAD, 3]), image_pad_id=PAD)


def test_pictures_must_be_in_the_store(tmp_path):
    store = ImageStore(tmp_path / "images")
    with pytest.raises(
        EpisodeError, match=rf"initial\[0\]\.parts\[0\]\.image\.sha256: {SHA} is not in the image store"
    ):
        _parse(dump(EPISODE), store=store)


def test_structs_that_json_would_change_are_refused():
    with pytest.raises(EpisodeError, match="tuples in structs"):
        dump(dataclasses.replace(EPISODE, labels={"x": (1, 2)}))
    with pytest.raises(EpisodeError, match="cannot be written as JSON"):
        dump(dataclasses.replace(EPISODE, labels={"x": {1}}))
    with pytest.raises(EpisodeError, match="cannot be written as JSON"):
        dump(dataclasses.replace(EPISODE, reward=float("nan")))


def test_task_invariants_and_digest():
    for change, reason in (
        ({"instruction": " "}, "instruction: is empty"),
        ({"channels": ()}, "channels: needs"),
        ({"channels": ("bash", "bash")}, "channels: needs"),
        ({"assets": (Asset(path="a", sha256="x", bytes=1),)}, r"assets\[0\]\.sha256: is not a sha256"),
    ):
        with pytest.raises(EpisodeError, match=reason):
            dump(dataclasses.replace(TASK, **change))
    later = dataclasses.replace(TASK, task_id="u", run_id="run-2", created_ns=5, gates={"oracle": True}, split="eval")
    assert later.digest() == TASK.digest() != dataclasses.replace(TASK, instruction="Other.").digest()


def test_the_agents_copy_of_a_task_does_not_tell_how_it_is_judged():
    line = dump(TASK.for_agent())
    assert "check" not in line and "oracle.sh" not in line and TASK.instruction in line


def test_image_store(tmp_path):
    store = ImageStore(tmp_path / "images")
    sha = store.put(b"picture")
    assert store.put(b"picture") == sha and sha in store and store.get(sha) == b"picture"
    assert [p.name for p in store.root.rglob("*") if p.is_file()] == [sha]
    store.path(sha).write_bytes(b"damaged")
    with pytest.raises(ImageStoreError, match="is damaged"):
        store.get(sha)
    store.path(sha).write_bytes(b"cut")
    store.put(b"picture")
    assert store.get(sha) == b"picture"
    with pytest.raises(ImageStoreError, match="is not in"):
        store.get(SHA)
    with pytest.raises(ImageStoreError, match="is not a sha256"):
        store.path("../../etc/passwd")


# Properties

_TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
_FLOATS = st.floats(allow_nan=False, allow_infinity=False)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | _FLOATS | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def _sampled(draw):
    tokens = draw(
        st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-1e30, 0), st.integers(4, 5)), min_size=1, max_size=5)
    )
    ids, logps, versions = zip(*tokens, strict=True)
    return dataclasses.replace(SAMPLED, gen_ids=ids, gen_logp=logps, gen_version=versions)


@given(
    labels=st.dictionaries(_TEXT, _JSON, max_size=3),
    text=_TEXT,
    detail=_TEXT,
    reward=_FLOATS,
    seed=st.none() | st.integers(),
    sampled=_sampled(),
)
@settings(deadline=None, max_examples=50)
def test_random_episodes_round_trip(labels, text, detail, reward, seed, sampled):
    versions = Versions(start=4, min=min(sampled.gen_version), max=max(sampled.gen_version))
    turn = dataclasses.replace(TURN, text=text, sampled=sampled)
    episode = dataclasses.replace(
        EPISODE,
        labels=labels,
        outcome=Outcome(kind="fail", detail=detail),
        reward=reward,
        seed=seed,
        turns=(turn,),
        versions=versions,
    )
    assert _parse(dump(episode)) == episode


def _paths(value, path=()):
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from _paths(child, (*path, key))


_PATHS = [path for path in _paths(strict_json.encode(EPISODE)) if path]


@given(path=st.sampled_from(_PATHS), value=_JSON)
@settings(deadline=None, max_examples=200)
def test_any_field_replaced_by_anything_parses_or_is_an_episode_error(path, value):
    data = strict_json.encode(EPISODE)
    at = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    try:
        episode = _parse(json.dumps(data))
    except EpisodeError as error:
        assert str(error).startswith("e.jsonl:7: ")
    else:
        assert _parse(dump(episode)) == episode


@given(st.binary(max_size=100))
def test_random_bytes_are_an_episode_error(raw):
    with pytest.raises(EpisodeError, match=r"^e\.jsonl:7: "):
        _parse(raw)
