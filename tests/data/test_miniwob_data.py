"""The shipped MiniWoB records are well-formed, and the pages they came from still look the same."""

import json
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

FOLDER = Path(__file__).parent / "miniwob"
TASKS = 17
PER_TASK = 6


def load(name: str) -> list[dict]:
    return [json.loads(line) for line in (FOLDER / name).read_text().splitlines()]


RECORDS = load("records.jsonl")
BY_ID = {record["id"]: record for record in RECORDS}


def task_of(record: dict) -> str:
    return record["id"].split("/")[1]


def image_path(record: dict) -> Path:
    return FOLDER / record["messages"][0]["content"][0]["image"]


def tool_call(record: dict) -> dict:
    found = re.fullmatch(r"Action: click .+\.\n<tool_call>\n(\{.*\})\n</tool_call>", record["messages"][1]["content"])
    assert found, record["messages"][1]["content"]
    return json.loads(found[1])


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record["id"])
def test_record(record):
    assert set(record) == {
        "id", "messages", "target_box", "image_size", "coord_space", "source", "license",
    }  # fmt: skip
    assert re.fullmatch(r"miniwob/[a-z0-9-]+/\d+", record["id"])
    assert (record["coord_space"], record["source"]) == ("thousand", "miniwob==1.1.0")
    assert record["license"] == "MIT"

    user, assistant = record["messages"]
    assert (user["role"], assistant["role"]) == ("user", "assistant")
    image, text = user["content"]
    assert set(image) == {"type", "image"} and image["type"] == "image"
    assert set(text) == {"type", "text"} and text["type"] == "text" and text["text"].strip()

    call = tool_call(record)
    assert set(call) == {"name", "arguments"} and call["name"] == "computer_use"
    assert set(call["arguments"]) == {"action", "coordinate"} and call["arguments"]["action"] == "click"

    with Image.open(image_path(record)) as picture:
        assert list(picture.size) == record["image_size"] == [160, 210]
        assert picture.format == "PNG"
        assert len(set(picture.convert("L").get_flattened_data())) > 1, "a blank screenshot"

    x0, y0, x1, y1 = record["target_box"]
    assert 0 <= x0 < x1 <= 160 and 50 <= y0 < y1 <= 210, "outside the task area"
    coordinate = call["arguments"]["coordinate"]
    assert all(isinstance(c, int) and 0 <= c <= 999 for c in coordinate)
    x, y = (round(c * extent / 1000) for c, extent in zip(coordinate, record["image_size"], strict=True))
    assert x0 < x < x1 and y0 < y < y1, "the click misses its target"


def test_counts():
    counts = Counter(map(task_of, RECORDS))
    assert len(counts) == TASKS and set(counts.values()) == {PER_TASK}
    assert len(BY_ID) == len(RECORDS), "ids repeat"
    rows = re.findall(r"^\| ([a-z0-9-]+) \| (\d+) \|$", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert {task: int(n) for task, n in rows} == {**counts, "all": len(RECORDS)}


def test_every_image_belongs_to_one_record():
    assert Counter(map(image_path, RECORDS)) == Counter((FOLDER / "images").iterdir())
    assert sum(path.stat().st_size for path in (FOLDER / "images").iterdir()) < 600_000


def test_split():
    train, heldout = load("train.jsonl"), load("heldout.jsonl")
    assert {record["id"]: record for record in train + heldout} == BY_ID
    assert len(train) + len(heldout) == len(RECORDS)
    assert Counter(map(task_of, heldout)) == dict.fromkeys(map(task_of, RECORDS), 1)
    seen = {image_path(record).read_bytes() for record in train}
    assert not any(image_path(record).read_bytes() in seen for record in heldout)


@pytest.mark.timeout(120)
@pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("chromedriver")),
    reason="chromium and chromedriver are not installed (launch/setup.sh --test)",
)
def test_pages_render_as_shipped():
    pytest.importorskip("selenium", reason="selenium is not installed (launch/setup.sh --test)")
    pytest.importorskip("miniwob", reason="miniwob is not installed (launch/setup.sh --test)")
    from tests.data.miniwob import render

    with render.open_browser() as browser:
        # Boxes set by text, and an icon that loads after the page has started.
        for task in ("click-button", "email-inbox-delete"):
            record = next(r for r in RECORDS if task_of(r) == task)
            page = render.render(browser, task, int(record["id"].split("/")[2]), seed=0)
            again = render.to_record(page)
            assert again["messages"][0] == record["messages"][0]
            assert again["image_size"] == record["image_size"]
            # Another version of Chromium may lay out a line a pixel higher or wider.
            assert again["target_box"] == pytest.approx(record["target_box"], abs=2)
            assert render.is_rewarded(browser, page, seed=0)
