"""Makes the MiniWoB click records beside this file: real pages, one instruction, one click each.

Each page of the `miniwob` package is opened in headless Chromium with a seed, photographed, and asked
(targets.js) which element answers its instruction. The recorded click is then replayed on a fresh copy
of the page and kept only if the page's own reward is positive.

    python tests/data/miniwob/render.py --out tests/data/miniwob
"""

import argparse
import base64
import importlib.util
import io
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

HERE = Path(__file__).resolve().parent
SIZE = (160, 210)  # the task area of every page, in CSS and screenshot pixels
SOURCE = "miniwob==1.1.0"

# Task -> the further clicks that finish it after the recorded one, as CSS selectors.
TASKS: dict[str, tuple[str, ...]] = {
    "click-test": (),
    "click-test-2": (),
    "click-button": (),
    "click-button-sequence": ("#subbtn2",),
    "click-link": (),
    "click-dialog": (),
    "click-dialog-2": (),
    "click-tab": (),
    "click-option": ("#subbtn",),
    "click-widget": (),
    "click-color": (),
    "click-shape": (),
    "identify-shape": (),
    "focus-text": (),
    "focus-text-2": (),
    "grid-coordinate": (),
    "email-inbox-delete": (),
}

# Text is measured in the same font everywhere: only DejaVu is visible to the browser, whatever else
# the machine has, so boxes do not depend on it. The pages themselves are not altered.
FONTS = """<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd"><fontconfig>
<dir>/usr/share/fonts/truetype/dejavu</dir><cachedir>{cache}</cachedir>
<match><edit name="family" mode="prepend" binding="strong"><string>DejaVu Sans</string></edit></match>
<match target="font"><edit name="antialias"><bool>true</bool></edit>
<edit name="hinting"><bool>true</bool></edit><edit name="hintstyle"><const>hintslight</const></edit>
<edit name="rgba"><const>none</const></edit></match>
</fontconfig>"""


@dataclass(frozen=True)
class Page:
    """What one seeded page shows; `box` and `phrase` are None where no single element answers it."""

    task: str
    number: int
    instruction: str
    box: tuple[int, int, int, int] | None
    phrase: str | None
    image: Image.Image

    @property
    def coordinate(self) -> tuple[int, int]:
        """The centre of the box in thousandths of the screen."""
        x0, y0, x1, y1 = self.box
        return to_thousand((x0 + x1) / 2, SIZE[0]), to_thousand((y0 + y1) / 2, SIZE[1])


def to_thousand(pixel: float, extent: int) -> int:
    return min(999, round(pixel * 1000 / extent))


def to_pixel(thousandth: int, extent: int) -> int:
    return min(extent - 1, round(thousandth * extent / 1000))


@contextmanager
def open_browser() -> Iterator[webdriver.Chrome]:
    """Headless Chromium from the system's packages, with an empty profile and nothing in the background."""
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not binary or not driver:
        raise FileNotFoundError("chromium and chromedriver are needed: bash launch/setup.sh --test")
    with tempfile.TemporaryDirectory(prefix="miniwob-browser-", ignore_cleanup_errors=True) as scratch:
        fonts = Path(scratch, "fonts.conf")
        fonts.write_text(FONTS.format(cache=Path(scratch, "fonts")))
        options = Options()
        options.binary_location = binary
        flags = [
            "--headless",
            "--disable-gpu",
            "--disable-quic",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--force-device-scale-factor=1",
            "--window-size=600,400",
            f"--user-data-dir={Path(scratch, 'profile')}",
        ]
        if os.geteuid() == 0:  # the sandbox refuses to run as root, and only then is it given up
            flags.append("--no-sandbox")
        for flag in flags:
            options.add_argument(flag)
        service = Service(driver, env={**os.environ, "FONTCONFIG_FILE": str(fonts)})
        browser = webdriver.Chrome(options=options, service=service)
        try:
            yield browser
        finally:
            browser.quit()


def mouse(browser: webdriver.Chrome, kind: str, x: float, y: float) -> None:
    event = {"type": kind, "x": x, "y": y, "button": "none" if kind == "mouseMoved" else "left", "clickCount": 1}
    browser.execute_cdp_cmd("Input.dispatchMouseEvent", event)


def click(browser: webdriver.Chrome, x: float, y: float) -> None:
    for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
        mouse(browser, kind, x, y)


def start(browser: webdriver.Chrome, task: str, number: int, seed: int) -> None:
    """Opens a fresh copy of the page and begins the episode that (seed, task, number) names."""
    folder = Path(importlib.util.find_spec("miniwob").submodule_search_locations[0], "html", "miniwob")
    browser.get(f"{(folder / task).as_uri()}.html")
    mouse(browser, "mouseMoved", 500, 350)  # nothing in the task area is hovered over
    # The page's own time limit (10 s) would end an episode on a busy machine.
    browser.execute_script(
        "Math.seedrandom(arguments[0]); core.EPISODE_MAX_TIME = 1e7; core.startEpisodeReal();",
        f"{seed}/{task}/{number}",
    )


def photograph(browser: webdriver.Chrome) -> Image.Image:
    clip = {"x": 0, "y": 0, "width": SIZE[0], "height": SIZE[1], "scale": 1}
    shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "clip": clip})
    return Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")


def settle(browser: webdriver.Chrome, timeout: float = 5.0) -> Image.Image:
    """Waits until the picture stops changing: icons load after the episode has begun."""
    end = time.monotonic() + timeout
    image = photograph(browser)
    while time.monotonic() < end:
        time.sleep(0.1)
        before, image = image, photograph(browser)
        if before == image:
            return image
    raise TimeoutError("the page did not come to rest")


def render(browser: webdriver.Chrome, task: str, number: int, seed: int) -> Page:
    start(browser, task, number, seed)
    image = settle(browser)
    page = browser.execute_script((HERE / "targets.js").read_text() + "return readPage(arguments[0]);", task)
    box = tuple(page["box"]) if page["box"] else None
    return Page(task, number, page["instruction"], box, page["phrase"], image)


def is_rewarded(browser: webdriver.Chrome, page: Page, seed: int) -> bool:
    """Replays the recorded coordinate (and what finishes the task) on a fresh copy of the page."""
    start(browser, page.task, page.number, seed)
    settle(browser)
    click(browser, *(to_pixel(c, extent) for c, extent in zip(page.coordinate, SIZE, strict=True)))
    for selector in TASKS[page.task]:
        where = "const r = document.querySelector(arguments[0]).getBoundingClientRect();"
        centre = browser.execute_script(where + "return [r.x + r.width / 2, r.y + r.height / 2];", selector)
        click(browser, *centre)
    done, reward = browser.execute_script("return [WOB_DONE_GLOBAL, WOB_RAW_REWARD_GLOBAL];")
    return bool(done) and reward > 0


def to_record(page: Page) -> dict:
    call = {"name": "computer_use", "arguments": {"action": "click", "coordinate": list(page.coordinate)}}
    turn = f"Action: click {page.phrase}.\n<tool_call>\n{json.dumps(call)}\n</tool_call>"
    question = [
        {"type": "image", "image": f"images/{page.task}-{page.number}.png"},
        {"type": "text", "text": page.instruction},
    ]
    return {
        "id": f"miniwob/{page.task}/{page.number}",
        "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": turn}],
        "target_box": list(page.box),
        "image_size": list(page.image.size),
        "coord_space": "thousand",
        "source": SOURCE,
        "license": "MIT",
    }


def save_png(image: Image.Image, path: Path) -> None:
    """Smallest lossless PNG: a palette where the colours fit in one."""
    if colors := image.getcolors(256):
        index = {color: i for i, (_, color) in enumerate(sorted(colors, reverse=True))}
        exact = Image.new("P", image.size)  # Image.quantize would merge close colours
        exact.putpalette([channel for color in index for channel in color])
        exact.putdata([index[pixel] for pixel in image.get_flattened_data()])
        image = exact
    image.save(path, optimize=True)


def good_pages(browser: webdriver.Chrome, task: str, wanted: int, seed: int) -> list[Page]:
    """The first `wanted` pages of a task with one answer that is rewarded, all of them different."""
    pages: list[Page] = []
    for number in range(20 * wanted):
        page = render(browser, task, number, seed)
        if page.box is None or any(page.image == other.image for other in pages):
            continue
        if is_rewarded(browser, page, seed):
            pages.append(page)
        else:
            print(f"dropped {task}/{number}: its click was not rewarded ({page.instruction})")
        if len(pages) == wanted:
            return pages
    raise RuntimeError(f"{task}: only {len(pages)} of {wanted} pages have one rewarded answer")


def write_lines(path: Path, records: Sequence[dict]) -> None:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def replace(new: Path, old: Path) -> None:
    if old.is_dir():
        shutil.rmtree(old)
    new.rename(old)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE, help="folder for images/ and the .jsonl files")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK")
    parser.add_argument("--per_task", type=int, default=6, help="pages a task; the last one is held out")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the renames at the end stay on one file system.
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        partial = Path(scratch)
        (partial / "images").mkdir()
        train, heldout = [], []
        with open_browser() as browser:
            for task in args.tasks:
                pages = good_pages(browser, task, args.per_task, args.seed)
                for page in pages:
                    save_png(page.image, partial / "images" / f"{task}-{page.number}.png")
                *first, last = [to_record(page) for page in pages]
                train += first
                heldout.append(last)
                print(f"{task}: {len(pages)} pages")
        write_lines(partial / "train.jsonl", train)
        write_lines(partial / "heldout.jsonl", heldout)
        write_lines(partial / "records.jsonl", sorted(train + heldout, key=lambda r: r["id"]))
        for name in ("images", "train.jsonl", "heldout.jsonl", "records.jsonl"):
            replace(partial / name, out / name)


if __name__ == "__main__":
    main()
