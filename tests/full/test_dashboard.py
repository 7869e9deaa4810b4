"""The page of a real server in a real browser: what it shows is what the routes say."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import requests
from playwright.sync_api import Browser

from sgl_esft import zoo
from tests.support import browser as browsers
from tests.support.browser import Dashboard
from tests.support.servers import Server, ServerPool, ServerSpec

pytestmark = pytest.mark.server

CLIENT_KEY = "client-key-of-the-dashboard"
ADMIN_KEY = "admin-key-of-the-dashboard"
FIRST = ("caesar", "intent")
BROKEN = "broken"
SCRIPT = "<script>window.wasRun = true</script>"
PICTURE = "<img src=x onerror='window.wasRun = true'>"
QUESTION = {"text": "coffee -> ", "sampling_params": {"temperature": 0, "max_new_tokens": 8}}

# What metrics.js makes of a text: a label, a sum, the median, the 0.99-quantile, that of nothing.
PARSED = """async () => {
  const m = await import("/dashboard/metrics.js");
  const lines = ['# HELP a x', 'a{le="1",k="q\\\\"}"} 2', 'a{le="2"} 6', 'a{le="+Inf"} 8', 'b 1'];
  const samples = m.parse(lines.join("\\n"), (name) => name === "a").get("a");
  const after = m.buckets(samples);
  return [samples[0].labels.k, m.total(samples), m.quantile(0.5, undefined, after),
    m.quantile(0.99, undefined, after), m.quantile(0.5, after, after)];
}"""
# A counter of 5 a second over 700 s: its rate at the end and at the start, the first time that is
# kept; then it falls to 0: how many samples are left.
RATED = """async () => {
  const m = await import("/dashboard/metrics.js");
  const history = new m.History();
  const sample = (time, c) => ({ time, counters: { c }, histograms: {} });
  for (let t = 0; t < 700; t += 2) history.add(sample(t, 5 * t));
  const line = history.rate("c");
  const found = [line.at(-1)[1], line[0][1], history.samples[0].time];
  history.add(sample(700, 0));
  return [...found, history.samples.length];
}"""
HIDE = """(hidden) => {
  Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""


@pytest.fixture(scope="module")
def server(server_pool: ServerPool, tmp_path_factory: pytest.TempPathFactory) -> Server:
    keys = tmp_path_factory.mktemp("keys") / "keys.json"
    entries = [
        {"name": "client", "key": CLIENT_KEY},
        {"name": "admin", "key": ADMIN_KEY, "admin": True},
    ]
    keys.write_text(json.dumps({"keys": entries}))
    keys.chmod(0o600)
    root = tmp_path_factory.mktemp("root")
    for name, folder in zoo.adapter_paths().items():
        shutil.copytree(folder, root / name)
    shutil.copytree(root / FIRST[0], root / BROKEN)
    (root / BROKEN / "expert_cfg.json").write_text(json.dumps({"experts": {SCRIPT: [0]}}))
    args = ("--api-keys-file", str(keys), "--enable-metrics", "--adapter-root", str(root))
    args += ("--max-adapters", "3", "--max-experts-per-adapter", "8")
    return server_pool.get(ServerSpec(None, tuple((name, root / name) for name in FIRST), args))


@pytest.fixture(scope="module")
def browser(server: Server) -> Iterator[Browser]:
    with browsers.opened() as opened:
        yield opened


@pytest.fixture(scope="module")
def admin(browser: Browser, server: Server) -> Dashboard:
    """The page with the admin's key, opened once."""
    board = Dashboard(browser, server.url).open()
    board.use_key(ADMIN_KEY)
    board.page.wait_for_selector(".cells")
    return board


def call(server: Server, method: str, route: str, body: object = None) -> requests.Response:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    return requests.request(method, server.url + route, json=body, headers=headers, timeout=120)


def ask(server: Server, adapter: str | None, **fields: Any) -> requests.Response:
    answer = call(server, "POST", "/generate", {**QUESTION, "lora_path": adapter, **fields})
    assert answer.status_code == 200, answer.text
    return answer


def device(server: Server) -> Mapping[str, Any]:
    (found,) = call(server, "GET", "/v1/memory").json()["devices"]
    return dict(found)


def test_without_a_key_the_page_asks_for_one(browser: Browser, server: Server) -> None:
    board = Dashboard(browser, server.url).open()
    board.until_text("#model", "a key is needed")
    board.until(lambda: board.text("#state") == "ready", "/readyz is for everyone")
    board.until_text("#state-reason", "1 rank")
    for panel in ("traffic", "memory"):
        board.until_text(f"#{panel} .notice", "This server wants a key")
        assert board.page.locator(f"#{panel} .body").is_hidden()
    board.use_key("no such key")
    board.until_text("#key-problem", "printable ASCII without spaces")
    board.use_key("an-unknown-key-0123456789")
    board.page.wait_for_timeout(500)
    board.until_text("#memory .notice", "This server wants a key")
    board.page.close()


def test_a_clients_key_shows_what_clients_may_see(browser: Browser, server: Server) -> None:
    board = Dashboard(browser, server.url).open()
    board.use_key(CLIENT_KEY)
    board.until_text("#model", "base")
    board.page.wait_for_selector(".chart")
    board.until_text("#memory .notice", "Type an admin key")
    board.page.close()


def test_the_key_stays_in_the_tab(admin: Dashboard) -> None:
    kept = admin.page.evaluate(
        "[Object.values(sessionStorage), localStorage.length, document.cookie]"
    )
    assert kept == [[ADMIN_KEY], 0, ""]
    assert ADMIN_KEY not in admin.page.content()
    assert not [url for url in admin.asked if ADMIN_KEY in url]
    admin.open()  # again: the tab still has it
    admin.page.wait_for_selector(".cells")
    admin.page.click("#key-forget")
    admin.until_text("#memory .notice", "This server wants a key")
    assert admin.page.evaluate("sessionStorage.length") == 0
    admin.use_key(ADMIN_KEY)
    admin.until(lambda: admin.page.locator("#memory .body").is_visible(), "no memory map")


def columns(admin: Dashboard, selector: str) -> int:
    """How many cells these are, wide ones counted as what they span."""
    widths = admin.page.locator(selector).evaluate_all(
        "nodes => nodes.map((node) => Number(node.getAttribute('width')))"
    )
    return round(sum(width + 1 for width in widths) / 10)


def test_the_memory_map_has_a_cell_for_each_run_of_slots(admin: Dashboard, server: Server) -> None:
    for adapter in FIRST:
        ask(server, adapter)
    report = device(server)
    layers = report["layers"]
    runs = {
        kind: [run["count"] for x in layers for run in x["runs"] if (run["owner"] < 0) == is_base]
        for kind, is_base in (("of-base", True), ("of-adapter", False))
    }
    assert runs["of-adapter"]
    admin.until(
        lambda: columns(admin, "#memory .of-adapter") == sum(runs["of-adapter"]),
        "adapters' slots differ",
    )
    assert admin.count("#memory .of-adapter") == len(runs["of-adapter"])
    assert columns(admin, "#memory .of-base") == sum(runs["of-base"])
    assert columns(admin, "#memory .cell") == sum(layer["num_slots"] for layer in layers)
    assert f"F_mem {report['fragmentation']:.3f}" in admin.text("#memory .facts")
    for adapter in FIRST:
        assert adapter in admin.text("#memory .legend")
    assert admin.text("#devices") == "1"


def test_a_slot_is_named_for_the_pointer_and_for_the_keyboard(
    admin: Dashboard, server: Server
) -> None:
    report = device(server)
    layer = report["layers"][0]
    admin.page.focus("#memory .cells")
    admin.until_text("#memory .readout", f"layer {layer['layer_id']}, slot 0: base")
    admin.page.keyboard.press("ArrowRight")
    admin.page.keyboard.press("ArrowDown")
    admin.until_text("#memory .readout", f"layer {report['layers'][1]['layer_id']}, slot 1: base")
    run = next(run for run in layer["runs"] if run["owner"] >= 0)
    name = next(name for name, slot in report["adapters"].items() if slot == run["owner"])
    admin.page.locator("#memory .of-adapter").first.hover(position={"x": 2, "y": 2})
    admin.until_text("#memory .readout", f"slot {run['first']}: {name}")


def adapter(server: Server, name: str) -> Mapping[str, Any]:
    answer = call(server, "GET", f"/v1/adapters/{name}")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def row(name: str) -> str:
    return f"tr[data-name='{name}']"


def test_the_table_follows_the_server(admin: Dashboard, server: Server) -> None:
    listed = call(server, "GET", "/v1/adapters").json()
    names = sorted(each["name"] for each in listed["adapters"])
    assert names == sorted([*zoo.adapter_paths(), BROKEN])
    admin.until(lambda: admin.count("#adapter-rows tr") == len(names), "rows are missing")
    assert f"of {listed['slots']['total']} adapter slots" in admin.text("#adapters-summary")
    assert admin.page.get_attribute(row("reverse"), "data-state") == "on_disk"
    assert call(server, "POST", "/v1/adapters?wait=true", {"name": "reverse"}).ok
    ask(server, "reverse")
    admin.page.wait_for_selector(f"{row('reverse')}[data-state=on_device]")
    found = adapter(server, "reverse")
    assert found["state"] == "on_device"
    assert f"{found['num_experts']} experts" in admin.text(row("reverse"))
    admin.until_text(
        f"{row('reverse')} [data-part=slots]", str(found["devices"][0]["adapter_slot"])
    )
    admin.until_text("#memory .legend", "reverse")


def test_the_buttons_do_what_they_say(admin: Dashboard, server: Server) -> None:
    def press(action: str) -> None:
        admin.page.click(f"{row('sum')} [data-act={action}]:enabled")

    press("load")
    admin.until(lambda: adapter(server, "sum")["digest"] is not None, "it is not loaded")
    press("pin")
    admin.until(lambda: adapter(server, "sum")["pinned"], "it is not pinned")
    admin.until_text(f"{row('sum')} [data-part=pinned]", "pinned")
    press("pin")
    admin.until(lambda: not adapter(server, "sum")["pinned"], "it is still pinned")
    press("reload")
    admin.until_text("#adapters-said", "Reload sum: accepted.")
    admin.until(lambda: adapter(server, "sum")["load"] is None, "the reload does not end")
    press("unload")
    admin.page.keyboard.press("Enter")  # Cancel has the focus
    admin.page.wait_for_timeout(300)
    assert adapter(server, "sum")["state"] != "on_disk"
    press("unload")
    admin.page.click("#confirm-yes")
    admin.until(lambda: adapter(server, "sum")["state"] == "on_disk", "it is not unloaded")
    admin.page.wait_for_selector(f"{row('sum')}[data-state=on_disk]")


def test_what_the_server_says_is_never_markup(admin: Dashboard, server: Server) -> None:
    assert not call(server, "POST", "/v1/adapters?wait=true", {"name": BROKEN}).ok
    admin.page.wait_for_selector(f"{row(BROKEN)}[data-state=failed]")
    said = adapter(server, BROKEN)["error"]
    assert SCRIPT in said["message"]
    admin.until_text(f"{row(BROKEN)} [data-part=detail]", f"{said['type']}: {said['message']}")
    admin.page.fill("#load-form [name=name]", "picture")
    admin.page.fill("#load-form [name=path]", PICTURE)
    admin.page.press("#load-form [name=path]", "Enter")
    admin.until_text("#adapters", "AdapterPathError")
    assert admin.count("main script, main img") == 0
    assert admin.page.evaluate("window.wasRun") is None


def test_a_failed_adapter_can_be_unloaded(admin: Dashboard, server: Server) -> None:
    assert not call(server, "POST", "/v1/adapters?wait=true", {"name": BROKEN}).ok
    admin.page.click(f"{row(BROKEN)}[data-state=failed] [data-act=unload]:enabled")
    admin.page.click("#confirm-yes")
    admin.page.wait_for_selector(f"{row(BROKEN)} [data-act=unload]:disabled")
    assert not adapter(server, BROKEN)["on_demand"]


def test_heat_is_that_of_the_adapters_asked(admin: Dashboard, server: Server) -> None:
    for name in FIRST:
        ask(server, name, sampling_params={"max_new_tokens": 64, "ignore_eos": True})
    heat = call(server, "GET", "/v1/heat").json()
    admin.until(
        lambda: admin.count(f"#heat-adapter option[value={FIRST[0]}]") == 1, "no such option"
    )
    for name in FIRST:
        admin.page.select_option("#heat-adapter", name)
        warm = sum(count > 0 for counts in heat["adapters"][name] for count in counts)
        assert warm > 0
        admin.until(lambda warm=warm: admin.count("#heat .warm") == warm, f"{name}: cells differ")
        assert admin.count("#heat .cell") == len(heat["layers"]) * heat["num_experts"]
    admin.until_text("#heat-steps", f"{heat['sampled_steps']} step")


def test_lines_are_drawn_from_what_the_metrics_count(admin: Dashboard, server: Server) -> None:
    path = "figure:has([aria-label='Tokens / s']) .line.one"
    end = time.monotonic() + 12
    while time.monotonic() < end and "L" not in (admin.page.get_attribute(path, "d") or ""):
        ask(server, FIRST[0], sampling_params={"max_new_tokens": 64, "ignore_eos": True})
        admin.page.wait_for_timeout(200)
    assert "L" in str(admin.page.get_attribute(path, "d"))
    admin.until(lambda: float(admin.text("#tokens-rate").replace(",", "")) > 0, "no tokens")
    assert admin.text("figure:has([aria-label='Time to first token']) .now").endswith(("ms", "s"))


def test_rates_and_quantiles_are_those_of_prometheus(admin: Dashboard) -> None:
    """The page's own arithmetic, on numbers that can be checked by hand."""
    assert admin.page.evaluate(PARSED) == ['q"}', 16, 1.5, 2, None]
    assert admin.page.evaluate(RATED) == [5, None, 98, 1]


def test_a_missing_route_is_said_and_nothing_breaks(browser: Browser, server: Server) -> None:
    board = Dashboard(browser, server.url)
    for route in ("memory", "heat", "instances", "scale?limit=20"):
        board.page.route(f"**/v1/{route}", lambda route: route.fulfill(status=404, body="{}"))
    board.page.route("**/metrics", lambda route: route.fulfill(status=404, body="no such page"))
    board.page.route("**/openapi.json", lambda route: route.fulfill(status=404, body="{}"))
    leaving = {"ready": False, "state": "draining", "reason": "the server drains", "ranks": []}
    board.page.route("**/readyz", lambda route: route.fulfill(status=503, json=leaving))
    board.open()
    board.use_key(ADMIN_KEY)
    board.until(lambda: board.text("#state") == "draining", "a drain is not shown")
    board.until_text("#state-reason", "the server drains")
    board.until_text("#traffic .notice", "start the server with --enable-metrics")
    board.until_text("#memory .notice", "it runs without weaving")
    board.until_text("#model", "base")
    assert board.page.locator("#devices-panel").is_hidden()
    assert board.page.locator("#timeline-panel").is_hidden()
    assert [text for text in board.complaints if "Failed to load resource" not in text] == []
    board.page.close()


def test_it_asks_less_where_nobody_looks_and_nobody_answers(
    browser: Browser, server: Server
) -> None:
    board = Dashboard(browser, server.url).open()
    board.use_key(ADMIN_KEY)
    board.page.wait_for_selector("#memory .cells")
    board.page.evaluate(HIDE, True)
    board.page.wait_for_timeout(500)
    before = len(board.asked)
    board.page.wait_for_timeout(3000)
    assert len(board.asked) == before
    board.page.evaluate(HIDE, False)
    board.until(lambda: len(board.asked) > before, "it does not begin again")
    board.page.context.set_offline(True)
    board.until_text("#reach", "cannot be reached")
    assert board.page.locator("#memory .body").is_visible(), "what was seen stays"
    before = len(board.asked)
    board.page.wait_for_timeout(5000)
    assert len(board.asked) - before <= 3, "one question at a time, ever more rarely"
    board.page.context.set_offline(False)
    board.until(lambda: board.text("#reach") == "", "it does not notice that the server is back")
    board.page.close()


@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits(browser: Browser, server: Server, width: int) -> None:
    board = Dashboard(browser, server.url, width=width, dark=width == 390).open()
    board.use_key(ADMIN_KEY)
    board.page.wait_for_selector(".cells")
    board.page.wait_for_selector(".chart")
    assert board.page.evaluate("document.documentElement.scrollWidth") <= width
    board.page.close()


def test_nothing_is_asked_elsewhere_and_nothing_complains(browser: Browser, server: Server) -> None:
    board = Dashboard(browser, server.url).open()
    board.use_key(ADMIN_KEY)
    board.page.wait_for_selector(".cells")
    board.page.goto("about:blank")  # so that nothing of the first requests, without key, is left
    board.complaints.clear()
    board.open()
    board.page.wait_for_selector(".cells")
    board.page.wait_for_timeout(4500)
    assert board.complaints == []
    assert board.hosts_asked() == {server.url.removeprefix("http://")}
    board.page.close()
