"""The page's scripts in a real browser, without a server: polling, heat of late, kept samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route

from sgl_esft.dashboard.pages import ROOT_PATH, read_pages
from tests.support import browser as browsers

URL = "http://dashboard.test"
PAGES = read_pages()

# Sources that answer, or fail as told; what was asked; what the page was told about its reach.
POLLED = """async (script) => {
  const { Poller } = await import("/dashboard/poll.js");
  const asked = [], failing = {}, reach = [], meanwhile = {};
  const source = (name, fields) => ({
    name,
    async ask() {
      asked.push(name);
      if (meanwhile[name]) meanwhile[name]();
      if (failing[name]) throw failing[name];
    },
    show() {},
    fail() {},
    everyMs: 0,
    ...fields,
  });
  const sources = [
    source("routes", { isQuick: true, everyMs: 60000 }),
    source("ready", { isQuick: true }),
    source("heat"),
    source("metrics"),
  ];
  const poller = new Poller(sources, (error) => reach.push(error ? error.message : ""));
  const round = async () => {
    asked.length = 0;
    await poller.round();
    return [...asked];
  };
  const due = (name) => (poller.sources.find((each) => each.name === name).dueMs = 0);
  const late = { status: 0, isLate: true, message: "late", retryAfterMs: 0 };
  const gone = { status: 0, isLate: false, message: "gone", retryAfterMs: 0 };
  const names = "round, due, failing, reach, late, gone, poller, meanwhile";
  const run = new Function(names, `return (async () => {${script}})()`);
  return await run(round, due, failing, reach, late, gone, poller, meanwhile);
}"""

HEAT = """async (minutes) => {
  const { source } = await import("/dashboard/heat.js");
  const steps = () => document.getElementById("heat-steps").textContent;
  const heat = (number) => ({
    layers: [1],
    num_experts: 2,
    sampled_steps: number,
    adapters: { base: [[number, 0]] },
  });
  let now = 0;
  performance.now = () => now;
  document.getElementById("heat-span").value = "lately";
  const found = [];
  for (const [minute, number] of minutes) {
    now = minute * 60000;
    source.show(heat(number));
    found.push(steps());
  }
  return found;
}"""

KEPT = """async () => {
  const m = await import("/dashboard/metrics.js");
  const history = new m.History();
  const counts = (all) => new Map([[1, all], [Infinity, all]]);
  const sample = (time, all) => ({ time, counters: {}, histograms: { a: counts(all) } });
  for (const [time, all] of [[0, 4], [4, 4], [8, 6]]) history.add(sample(time, all));
  const [first, second, third] = history.samples.map((each) => each.histograms.a);
  return [first === second, second === third, third.get(1)];
}"""

METRICS = """
sgl_esft:requests_total{adapter="math",outcome="ok"} %d
sgl_esft:requests_total{adapter="base",outcome="failed"} 1
sgl_esft:generation_tokens_total{adapter="math"} 8
"""


# The memory map of a rank; after it how many elements, what they are as x and width, what is said.
MAP = """async ([ranks, layers, slots, runs]) => {
  const { source } = await import("/dashboard/memory.js");
  const layer = (id) => ({
    layer_id: id, num_slots: slots, slot_bytes: 1024, mapped_bytes: 0,
    runs: runs.map(([first, count, owner]) => ({ first, count, owner })),
  });
  const device = (rank) => ({
    rank, device: "cpu", expert_memory: "virtual", adapters: { math: 0 }, mapped_bytes: 0,
    shared_bytes: 0, padded_bytes: 0, fragmentation: 1, padded_fragmentation: 1,
    layers: Array.from({ length: layers }, (_, index) => layer(index)),
  });
  source.show({ devices: Array.from({ length: ranks }, (_, rank) => device(rank)) });
  const cells = [...document.querySelectorAll("#memory .cell")];
  const number = (cell, name) => Number(cell.getAttribute(name));
  const drawn = cells
    .slice(0, cells.length / ranks / layers)
    .map((cell) => [cell.getAttribute("class"), number(cell, "x"), number(cell, "width")]);
  const picture = document.querySelector("#memory .cells");
  const readout = document.querySelector("#memory .readout");
  picture.focus();
  const said = [readout.textContent];
  for (let slot = 1; slot < slots; slot += 1) {
    picture.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
    said.push(readout.textContent);
  }
  picture.blur();
  return [cells.length, drawn, said];
}"""


# A list of which the first item goes, one comes, and the focus is in the last.
KEYED = """async () => {
  const { el, keyed } = await import("/dashboard/dom.js");
  const list = el("div");
  document.body.append(list);
  const show = (names) =>
    keyed(list, names, (name) => name, (name) => el("button", {}, name), () => {});
  show(["a", "b", "c"]);
  list.lastElementChild.focus();
  show(["b", "bb", "c"]);
  return [list.textContent, document.activeElement.textContent];
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsers.opened() as opened:
        yield opened


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """The page; every route but its own files is missing."""
    opened = browser.new_page()
    opened.route("**/*", answer)
    opened.goto(URL + ROOT_PATH)
    yield opened
    opened.close()


def answer(route: Route) -> None:
    found = PAGES.get(route.request.url.removeprefix(URL))
    if found is None:
        route.fulfill(status=404, body="{}")
    else:
        route.fulfill(body=found.body, content_type=found.media_type)


def polled(page: Page, script: str) -> Any:
    return page.evaluate(POLLED, script)


def test_a_late_answer_of_busy_ranks_stops_nothing_else(page: Page) -> None:
    found = polled(page, "failing.heat = late; return [await round(), await round(), reach];")
    everything = ["routes", "ready", "heat", "metrics"]
    assert found == [everything, ["ready", "metrics"], [""] * 5]


def test_a_server_that_is_late_by_itself_is_out_of_reach(page: Page) -> None:
    found = polled(
        page,
        """await round();
        failing.ready = late;
        return [await round(), reach.at(-1), await round()];""",
    )
    assert found == [["ready"], "late", []]


def test_a_server_that_is_back_is_asked_everything_and_its_routes_first(page: Page) -> None:
    found = polled(
        page,
        """await round();
        failing.ready = gone;
        const lost = await round();
        delete failing.ready;
        due("ready");
        return [lost, reach.at(-1), await round(), await round()];""",
    )
    everything = ["routes", "ready", "heat", "metrics"]
    assert found == [["ready"], "gone", ["ready"], everything]


def test_what_is_wanted_again_while_it_is_asked_is_asked_again(page: Page) -> None:
    """As when a key is typed while the answer to the page without one is on its way."""
    found = polled(
        page,
        """failing.heat = { status: 401, message: "a key", retryAfterMs: 0 };
        poller.wake = () => {};
        meanwhile.heat = () => { poller.refresh("heat"); delete meanwhile.heat; };
        const first = await round();
        delete failing.heat;
        return [first.includes("heat"), (await round()).includes("heat")];""",
    )
    assert found == [True, True]


def test_the_last_minute_is_no_longer_than_that(page: Page) -> None:
    """Nothing is known of it at first, nor after an hour in a hidden tab."""
    asked = [(0, 100), (0.4, 104), (0.8, 130), (1.2, 140), (1.6, 150), (61, 900), (61.1, 905)]
    assert page.evaluate(HEAT, asked) == [
        f"{number} steps sampled" for number in (0, 4, 30, 40, 46, 0, 5)
    ]


def test_a_histogram_that_rests_is_kept_once(page: Page) -> None:
    assert page.evaluate(KEPT) == [True, False, 6]


def test_a_row_that_goes_leaves_the_focus_where_it_is(page: Page) -> None:
    assert page.evaluate(KEYED) == ["bbbc", "c"]


def test_rates_are_those_of_the_chosen_adapter(page: Page) -> None:
    script = """async ([first, second]) => {
      const { source, setUp } = await import("/dashboard/traffic.js");
      let time = 1000000;
      Date.now = () => time;
      source.show(first);
      time += 4000;
      source.show(second);
      const shown = () => {
        const [ended, failed] = document.querySelectorAll("#charts .now");
        return [ended.textContent, failed.textContent];
      };
      const found = [shown()];
      for (const name of ["math", "base"]) {
        document.getElementById("traffic-adapter").value = name;
        document.getElementById("traffic-adapter").dispatchEvent(new Event("change"));
        found.push(shown());
      }
      return found;
    }"""
    found = page.evaluate(script, [METRICS % 2, METRICS % 10])
    assert found == [["2.0", "0"], ["2.0", "0"], ["0", "0"]]


def test_slots_of_one_owner_are_one_element_and_each_has_its_words(page: Page) -> None:
    number, drawn, said = page.evaluate(MAP, [2, 3, 8, [[0, 3, -1], [4, 2, 0]]])
    assert number == 2 * 3 * 4
    assert drawn == [
        ["cell of-base", 0.5, 29],
        ["cell hollow", 30.5, 9],
        ["cell of-adapter", 40.5, 19],
        ["cell hollow", 60.5, 19],
    ]
    base, math, none = "base, 1.02 KB", "math, 1.02 KB", "no memory of its own"
    owners = [base, base, base, none, math, math, none, none]
    assert said == [f"layer 0, slot {slot}: {whose}" for slot, whose in enumerate(owners)]
    number, drawn, _ = page.evaluate(MAP, [2, 3, 8, [[0, 8, -1]]])
    assert (number, drawn) == (6, [["cell of-base", 0.5, 79]]), "another report, other runs"


def test_the_map_of_a_large_model_stays_small(page: Page) -> None:
    """DeepSeek-V3's layers on 8 ranks, 16 adapters: 227,000 slots."""
    runs = [[0, 32, -1], *([32 + 28 * slot, 9, slot] for slot in range(16))]
    number, _, _ = page.evaluate(MAP, [8, 58, 32 + 28 * 16, runs])
    assert number == 8 * 58 * (1 + 2 * 16)


def test_a_key_that_is_forgotten_leaves_nothing_on_the_page(page: Page) -> None:
    page.fill("#key", "an-admin-key-0123456789")
    page.press("#key", "Enter")
    page.evaluate("document.getElementById('adapter-rows').append('what an admin saw')")
    page.click("#key-forget")
    page.wait_for_selector("#key[placeholder='API key']")
    page.wait_for_function("!document.body.textContent.includes('what an admin saw')", timeout=5000)
    assert page.evaluate("sessionStorage.length") == 0
