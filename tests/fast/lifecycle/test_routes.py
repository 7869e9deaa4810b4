"""The adapter routes and the middleware over a real library, with an engine that a test holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from sgl_esft.errors import (
    AdapterFormatError,
    AdapterMismatchError,
    NoFreeSlotError,
    RequestTimeoutError,
)
from sgl_esft.lifecycle.adapter_engine import LoadedAdapter, LoadPhase, Residency
from tests.fast.lifecycle.site import Site, touch_folder, write_folder

pytestmark = pytest.mark.anyio


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "adapters"
    root.mkdir()
    for name in ("math", "law"):
        write_folder(root / name, f"{name} v1")
    return root


async def test_what_lies_on_disk_is_listed(root: Path) -> None:
    write_folder(root / "bad", "broken")
    (root / "no adapter").mkdir()
    (root / "empty").mkdir()
    site = Site(root)
    listed = await site.adapters()
    assert {name: each["state"] for name, each in listed.items()} == {
        "math": "on_disk",
        "law": "on_disk",
        "bad": "failed",
    }
    assert listed["bad"]["error"] == {
        "type": "AdapterFormatError",
        "message": "bad is broken",
    }
    assert listed["math"]["folder"] == "math"
    assert listed["math"]["num_experts"] == 3
    one = await site.client.get("/v1/adapters/math")
    assert one.json() == listed["math"]
    missing = await site.client.get("/v1/adapters/nobody")
    assert missing.status_code == 404
    assert missing.json()["error"]["type"] == "UnknownAdapterError"


async def test_load_is_asynchronous_with_progress_and_idempotent(site: Site) -> None:
    site.engine.holds = True
    first = await site.client.post("/v1/adapters", json={"name": "math"})
    assert first.status_code == 202
    assert first.headers["location"] == "/v1/adapters/math"
    await site.settle()
    site.engine.pending["math"].on_progress(LoadPhase.PLACING, 0.25)
    again = await site.client.post("/v1/adapters", json={"name": "math"})
    assert again.status_code == 202
    load = {"phase": "placing", "progress": 0.25, "replaces": False}
    assert again.json()["load"] == load
    assert again.json()["state"] == "loading"
    site.engine.finish("math")
    await site.settle()
    third = await site.client.post("/v1/adapters", json={"name": "math"})
    assert third.status_code == 200
    assert third.json()["state"] == "in_host_cache"
    assert third.json()["load"] is None
    assert site.engine.num_loads == 1


async def test_wait_answers_with_the_end(site: Site) -> None:
    done = await site.client.post("/v1/adapters?wait=true", json={"name": "math"})
    assert done.status_code == 201
    site.engine.slots[site.engine.loaded()[0].adapter_id] = 2
    shown = (await site.client.get("/v1/adapters/math")).json()
    assert shown["state"] == "on_device"
    assert shown["devices"] == [{"rank": 0, "adapter_slot": 2, "mapped_bytes": 4096}]
    listing = (await site.client.get("/v1/adapters")).json()
    assert listing["slots"] == {"total": 3, "used": 1}
    assert listing["host"] == {"budget_bytes": None, "used_bytes": 100}
    site.engine.fails["law"] = AdapterMismatchError("made for another base")
    refused = await site.client.post("/v1/adapters?wait=true", json={"name": "law"})
    assert refused.status_code == 400
    assert refused.json()["error"]["type"] == "AdapterMismatchError"
    assert (await site.adapters())["law"]["state"] == "failed"


async def test_a_hundred_requests_cause_one_load_and_share_its_failure(site: Site) -> None:
    site.engine.holds = True
    asked = [asyncio.create_task(site.generate("math")) for _ in range(100)]
    await site.until_asked_for(100)
    site.engine.finish("math")
    answers = await asyncio.gather(*asked)
    assert {each.status_code for each in answers} == {200}
    assert site.engine.num_loads == 1
    failing = [asyncio.create_task(site.generate("law")) for _ in range(20)]
    await site.until_asked_for(120)
    site.engine.finish("law", NoFreeSlotError("all are pinned"))
    answers = await asyncio.gather(*failing)
    assert {each.status_code for each in answers} == {503}
    assert {each.headers["retry-after"] for each in answers} == {"1"}
    assert site.engine.num_loads == 2


async def test_lists_and_model_names_are_loaded_too(site: Site) -> None:
    answer = await site.generate(["math", None, "law", "math"])
    digests = {each.name: each.digest for each in site.engine.loaded()}
    assert answer.json()["digests"] == [
        digests["math"],
        "base",
        digests["law"],
        digests["math"],
    ]
    body = {"prompt": "x", "model": "base:math"}
    assert (await site.client.post("/v1/completions", json=body)).status_code == 404  # no route
    assert (await site.generate("nobody")).status_code == 404
    assert site.engine.num_loads == 2


async def test_a_request_does_not_wait_for_ever_and_leaves_the_load_alone(root: Path) -> None:
    site = Site(root, holds=True, timeout_s=0.05)
    late = await site.generate("math")
    assert late.status_code == 503
    assert late.json()["error"]["type"] == "AdapterLoadTimeoutError"
    await site.settle()
    left = asyncio.create_task(site.generate("math"))
    await asyncio.sleep(0.01)
    left.cancel()
    await asyncio.sleep(0.01)
    site.engine.finish("math")
    await site.settle()
    assert (await site.generate("math")).status_code == 200
    assert site.engine.num_loads == 1


async def test_a_failed_adapter_is_not_tried_again_until_it_changes(site: Site) -> None:
    site.engine.fails["math"] = AdapterMismatchError("made for another base")
    for _ in range(3):
        assert (await site.generate("math")).status_code == 400
    assert site.engine.num_loads == 1
    site.write("math", "math v2")
    assert (await site.adapters())["math"]["state"] == "on_disk"
    assert (await site.generate("math")).status_code == 200
    site.write("law", "broken")
    assert (await site.generate("law")).json()["error"]["message"] == "law is broken"
    assert site.engine.num_loads == 2


async def test_an_unloaded_adapter_stays_away_until_it_is_asked_for(site: Site) -> None:
    assert (await site.generate("math")).status_code == 200
    deleted = await site.client.delete("/v1/adapters/math?wait=true")
    assert deleted.status_code == 204
    assert (await site.generate("math")).status_code == 404
    shown = (await site.adapters())["math"]
    assert shown["state"] == "on_disk"
    assert shown["on_demand"] is False
    assert (await site.client.delete("/v1/adapters/math")).status_code == 204
    loaded = await site.client.post("/v1/adapters?wait=true", json={"name": "math"})
    assert loaded.status_code == 201
    await site.client.delete("/v1/adapters/math?wait=true")
    site.write("math", "math v2")
    assert (await site.generate("math")).status_code == 200
    assert (await site.client.delete("/v1/adapters/nobody")).status_code == 404


async def test_replacing_lets_requests_in_flight_end_on_the_old(site: Site) -> None:
    await site.client.post("/v1/adapters?wait=true", json={"name": "math", "pinned": True})
    old = (await site.adapters())["math"]["digest"]
    site.running = asyncio.Event()
    flying = asyncio.create_task(site.generate("math"))
    await asyncio.sleep(0.02)
    site.write("math", "math v2")
    await _until(site, lambda shown: shown["changed_on_disk"] is True)
    same = await site.client.post("/v1/adapters", json={"name": "math"})
    assert same.status_code == 409
    assert same.json()["error"]["type"] == "AdapterExistsError"
    done = await site.client.patch("/v1/adapters/math?wait=true", json={"reload": True})
    assert done.status_code == 200
    shown = done.json()
    assert shown["digest"] != old
    assert shown["pinned"] is True
    assert shown["draining_versions"] == [{"digest": old, "num_references": 1}]
    site.running.set()
    assert (await flying).json()["digests"] == [old]
    assert (await site.adapters())["math"]["draining_versions"] == []
    assert (await site.generate("math")).json()["digests"] == [shown["digest"]]
    await _until(site, lambda shown: shown["changed_on_disk"] is False)
    loads = site.engine.num_loads
    again = await site.client.patch("/v1/adapters/math", json={"reload": True})
    assert again.status_code == 200
    assert site.engine.num_loads == loads


async def _until(site: Site, is_so: Callable[[dict[str, Any]], bool]) -> None:
    """What is read beside everything else is known a little later."""
    while not is_so((await site.adapters())["math"]):
        await asyncio.sleep(0.005)


async def test_touching_a_folder_is_no_change(site: Site, root: Path) -> None:
    await site.generate("math")
    touch_folder(root / "math")
    await _until(site, lambda shown: shown["changed_on_disk"] is False)
    done = await site.client.post("/v1/adapters", json={"name": "math"})
    assert done.status_code == 200


async def test_a_replacement_that_fails_leaves_the_old(site: Site) -> None:
    await site.generate("math")
    old = (await site.adapters())["math"]["digest"]
    site.write("math", "math v2")
    site.engine.fails["math"] = AdapterMismatchError("made for another base")
    failed = await site.client.patch("/v1/adapters/math?wait=true", json={"reload": True})
    assert failed.status_code == 400
    shown = (await site.adapters())["math"]
    assert shown["digest"] == old
    assert shown["error"]["type"] == "AdapterMismatchError"
    assert (await site.generate("math")).json()["digests"] == [old]
    site.engine.evict("math")  # what failed was the replacement: a load may work
    assert (await site.generate("math")).status_code == 200


async def test_delete_during_a_load_comes_after_it(site: Site) -> None:
    site.engine.holds = True
    await site.client.post("/v1/adapters", json={"name": "math"})
    await site.settle()
    for _ in range(2):
        deleted = await site.client.delete("/v1/adapters/math")
        assert deleted.status_code == 202
        assert deleted.json()["state"] == "loading"
    assert (await site.generate("math")).status_code == 404
    for change in ({"pinned": True}, {"reload": True}):
        busy = await site.client.patch("/v1/adapters/math", json=change)
        assert busy.status_code == 409
        assert busy.json()["error"]["type"] == "AdapterBusyError"
        assert busy.headers["retry-after"] == "1"
    assert (await site.client.post("/v1/adapters", json={"name": "math"})).status_code == 409
    waiting = asyncio.create_task(site.client.delete("/v1/adapters/math?wait=true"))
    await asyncio.sleep(0.01)
    site.engine.finish("math")
    assert (await waiting).status_code == 204
    assert list(site.engine.loaded()) == []
    await site.client.post("/v1/adapters", json={"name": "math"})
    await site.settle()
    waiting = asyncio.create_task(site.client.delete("/v1/adapters/math?wait=true"))
    await asyncio.sleep(0.01)
    site.engine.finish("math", AdapterMismatchError("made for another base"))
    assert (await waiting).status_code == 204


async def test_pins(site: Site) -> None:
    early = await site.client.patch("/v1/adapters/math", json={"pinned": True})
    assert early.status_code == 409
    assert early.json()["error"]["type"] == "AdapterNotLoadedError"
    await site.generate("math")
    for pinned in (True, True, False):
        done = await site.client.patch("/v1/adapters/math", json={"pinned": pinned})
        assert done.json()["pinned"] is pinned
    done = await site.client.post("/v1/adapters", json={"name": "math", "pinned": True})
    assert (done.status_code, done.json()["pinned"]) == (200, True)


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/adapters", {"name": "../math"}, 400),
        ("POST", "/v1/adapters", {"name": "default", "path": "math"}, 400),
        ("POST", "/v1/adapters", {"name": "math", "path": "../elsewhere"}, 400),
        ("POST", "/v1/adapters", {"name": "math", "path": "/etc"}, 400),
        ("POST", "/v1/adapters", {"name": "math", "path": "a\0b"}, 400),
        ("POST", "/v1/adapters", {"name": "new"}, 400),
        ("POST", "/v1/adapters", {"name": "math", "what": 1}, 400),
        ("POST", "/v1/adapters", {"name": 3}, 400),
        ("POST", "/v1/adapters", [], 400),
        ("PATCH", "/v1/adapters/math", {}, 400),
        ("PATCH", "/v1/adapters/math", {"reload": False}, 400),
        ("PATCH", "/v1/adapters/nobody", {"pinned": True}, 404),
        ("PATCH", "/v1/adapters/nobody", {"reload": True}, 404),
        ("POST", "/v1/adapters?wait=perhaps", {"name": "math"}, 400),
    ],
)
async def test_bad_requests(site: Site, method: str, path: str, body: Any, status: int) -> None:
    answer = await site.client.request(method, path, json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == status
    assert set(error) == {"message", "type", "param", "code"}
    assert "elsewhere exists" not in error["message"]
    assert site.engine.num_loads == 0


async def test_a_link_out_of_the_root_is_listed_with_what_is_wrong(
    root: Path, tmp_path: Path
) -> None:
    write_folder(tmp_path / "outside", "outside v1")
    (root / "linked").symlink_to(tmp_path / "outside")
    site = Site(root)
    shown = (await site.adapters())["linked"]
    assert shown["state"] == "failed"
    assert shown["error"]["type"] == "AdapterPathError"
    assert str(tmp_path / "outside") not in shown["error"]["message"]
    assert (await site.generate("linked")).status_code == 400
    assert site.engine.num_loads == 0


async def test_a_listing_survives_a_file_name_that_is_not_unicode(site: Site) -> None:
    site.engine.fails["math"] = AdapterFormatError("the adapter holds \udcff.bin")
    load = {"lora_name": "math", "lora_path": "math"}
    assert (await site.client.post("/load_lora_adapter", json=load)).status_code == 400
    message = (await site.adapters())["math"]["error"]["message"]
    assert message == "the adapter holds \udcff.bin"
    site.engine.fails["math"] = AdapterFormatError("the adapter holds \udcff.bin")
    refused = await site.client.post("/v1/adapters?wait=true", json={"name": "math"})
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, message)


async def test_an_unknown_name_asks_the_engine_a_few_times_only(root: Path) -> None:
    for number in range(30):
        write_folder(root / f"a{number}", f"{number}")
    site = Site(root)
    asked: list[int] = []
    loaded = site.engine.loaded

    def counting() -> Sequence[LoadedAdapter]:
        asked.append(1)
        return loaded()

    site.engine.loaded = counting  # type: ignore[method-assign]
    assert (await site.generate("nobody")).status_code == 404
    assert len(await site.adapters()) == 32
    assert len(asked) < 20


async def test_a_listing_does_not_need_the_ranks(site: Site) -> None:
    assert (await site.generate("math")).status_code == 200
    site.engine.slots[site.engine.loaded()[0].adapter_id] = 2
    assert (await site.adapters())["math"]["state"] == "on_device"

    async def fail() -> Mapping[str, tuple[Residency, ...]]:
        raise RequestTimeoutError("the ranks have not answered")

    site.engine.residency = fail  # type: ignore[method-assign]
    assert (await site.adapters())["math"]["state"] == "on_device"


async def test_without_a_root_a_path_is_needed(tmp_path: Path) -> None:
    write_folder(tmp_path / "math", "math v1")
    site = Site(None)
    refused = await site.client.post("/v1/adapters", json={"name": "math"})
    assert refused.json()["error"]["type"] == "AdapterPathError"
    body = {"name": "math", "path": str(tmp_path / "math")}
    done = await site.client.post("/v1/adapters?wait=true", json=body)
    assert done.status_code == 201
    assert done.json()["folder"] == str(tmp_path / "math")
    assert (await site.client.delete("/v1/adapters/math?wait=true")).status_code == 204
    assert await site.adapters() == {}
    assert (await site.client.delete("/v1/adapters/math")).status_code == 404


async def test_clients_of_vllm(site: Site) -> None:
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    body = {"lora_name": "m", "lora_path": "math", "is_3d_lora_weight": False}
    done = await site.client.post(load, json=body)
    assert done.status_code == 200
    assert done.text == "Success: LoRA adapter 'm' added successfully."
    assert (await site.client.post(load, json=body)).status_code == 400
    inplace = {**body, "lora_path": "law", "load_inplace": True}
    assert (await site.client.post(load, json=inplace)).status_code == 200
    assert (await site.adapters())["m"]["folder"] == "law"
    missing = await site.client.post(load, json={"lora_name": "n", "lora_path": "nowhere"})
    assert missing.status_code == missing.json()["error"]["code"] == 404
    assert (await site.client.post(load, json={"lora_name": "n"})).status_code == 400
    gone = await site.client.post(unload, json={"lora_name": "m"})
    assert gone.text == "Success: LoRA adapter 'm' removed successfully."
    assert (await site.client.post(unload, json={"lora_name": "m"})).status_code == 404
    assert (await site.client.post(unload, json={"lora_name": "law"})).status_code == 404


async def test_clients_of_sglang(site: Site, root: Path) -> None:
    load, unload = "/load_lora_adapter", "/unload_lora_adapter"
    body = {"lora_name": "m", "lora_path": str(root / "math"), "pinned": True}
    done = await site.client.post(load, json=body)
    assert done.json() == {
        "success": True,
        "error_message": "",
        "loaded_adapters": {"m": str(root / "math")},
    }
    assert (await site.adapters())["m"]["pinned"] is True
    twice = await site.client.post(load, json=body)
    assert twice.status_code == 400
    assert twice.json()["error_message"].startswith("AdapterExistsError: ")
    gone = await site.client.post(unload, json={"lora_name": "m"})
    assert (gone.status_code, gone.json()["loaded_adapters"]) == (200, {})
    assert (await site.client.post(unload, json={"lora_name": "m"})).status_code == 400


async def test_openapi_describes_every_route(site: Site) -> None:
    document = (await site.client.get("/openapi.json")).json()
    found = {
        (method.upper(), path)
        for path, methods in document["paths"].items()
        for method, said in methods.items()
        if said.get("tags") == ["adapters"]
    }
    assert len(found) == 9
    assert document["paths"]["/load_lora_adapter"]["post"]["tags"] == ["adapters"]
