"""Pictures of the page for docs/dashboard.md, from a server that runs, under a little load.

    python -m scripts.dashboard_pictures http://127.0.0.1:30000 docs/pictures/dashboard.png

Needs a browser (`make browser`) and a server without keys, started with --enable-metrics.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
import urllib.request
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from scripts import browsers

PROMPTS = ("coffee -> ", "spoon -> ", "7 + 5 = ", "winter -> ")
STREAMS = 3


def main() -> None:
    """Load the server, open the page, wait until its lines are long enough, take the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("out", type=Path)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--seconds", type=float, default=60, help="of load before the picture")
    parser.add_argument(
        "--scale", type=int, nargs="*", default=[], help="devices, one after another"
    )
    wanted = parser.parse_args()
    try:
        browser_path = browsers.find()
    except browsers.NoBrowserError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    stop = threading.Event()
    for seed in range(STREAMS):
        threading.Thread(target=load, args=(wanted.url, stop, seed), daemon=True).start()
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        scheme = "dark" if wanted.dark else "light"
        page = browser.new_page(
            viewport={"width": wanted.width, "height": 800}, color_scheme=scheme
        )
        page.goto(f"{wanted.url}/dashboard")
        for size in wanted.scale:
            page.wait_for_timeout(wanted.seconds * 1000 / len(wanted.scale) / 2)
            scale(page, wanted.url, size)
        page.wait_for_timeout(wanted.seconds * 1000 / (2 if wanted.scale else 1))
        save(page, wanted.out)
        browser.close()
    stop.set()


def load(url: str, stop: threading.Event, seed: int) -> None:
    """Requests one after the other, streamed, for adapters and the base."""
    rng = random.Random(seed)
    adapters: list[str | None] = [None, *loaded_adapters(url)]
    while not stop.is_set():
        body = {
            "text": rng.choice(PROMPTS),
            "lora_path": rng.choice(adapters),
            "stream": True,
            "sampling_params": {"max_new_tokens": rng.randint(8, 48), "ignore_eos": True},
        }
        request(f"{url}/generate", body)
        time.sleep(rng.random())


def loaded_adapters(url: str) -> list[str]:
    """Names, as clients see them."""
    models = json.loads(request(f"{url}/v1/models"))["data"]
    return [model["id"] for model in models if model["parent"]]


def request(url: str, body: dict[str, Any] | None = None) -> bytes:
    """The answer to a GET, or to a POST of JSON."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    asked = urllib.request.Request(url, data=data, headers=headers)
    with urllib.request.urlopen(asked, timeout=120) as answer:
        found: bytes = answer.read()
    return found


def scale(page: Page, url: str, size: int) -> None:
    """To another number of devices; returns when that has ended."""
    operation = json.loads(request(f"{url}/v1/scale", {"dp_size": size}))
    while operation["state"] in ("pending", "running"):
        page.wait_for_timeout(500)
        operation = json.loads(request(f"{url}/v1/scale/{operation['id']}"))


def save(page: Page, out: Path) -> None:
    """The whole page; compressed better than a browser does."""
    Image.open(BytesIO(page.screenshot(full_page=True))).convert("RGB").save(out, optimize=True)


if __name__ == "__main__":
    main()
