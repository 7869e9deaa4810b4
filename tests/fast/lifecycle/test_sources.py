"""Where an adapter comes back from after it was evicted, and when a failed one is tried again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sgl_esft.errors import EsftError, InvariantError, RequestTimeoutError
from sgl_esft.formats.manifest import content_digest
from tests.fast.lifecycle.site import Site, write_folder

pytestmark = pytest.mark.anyio


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    write_folder(root / "math", "math v1")
    write_folder(root / "math-next", "math version 2")
    return root


async def used(site: Site, name: str) -> str:
    """The content that answers a request."""
    answer = await site.generate(name)
    assert answer.status_code == 200, answer.text
    digest: str = answer.json()["digests"][0]
    return digest


async def test_an_evicted_adapter_comes_back_from_where_it_came(site: Site, root: Path) -> None:
    assert await used(site, "math") == content_digest(root / "math")
    change = {"path": "math-next"}
    assert (await site.client.patch("/v1/adapters/math?wait=true", json=change)).is_success
    site.engine.evict("math")
    write_folder(root / "math", "broken")  # nobody asks for that one
    site.catalogue.refresh()
    assert (await site.adapters())["math"]["folder"] == "math-next"
    assert await used(site, "math") == content_digest(root / "math-next")
    await site.client.delete("/v1/adapters/math?wait=true")
    write_folder(root / "math", "math v3, long")
    site.catalogue.refresh()
    assert await used(site, "math") == content_digest(root / "math")


async def test_one_that_leaves_while_it_is_replaced_is_waited_for(site: Site, root: Path) -> None:
    """The name means nothing then, until the new version is there."""
    assert await used(site, "math") == content_digest(root / "math")
    site.engine.holds = True
    change = {"path": "math-next"}
    assert (await site.client.patch("/v1/adapters/math", json=change)).status_code == 202
    while "math" not in site.engine.pending:
        await asyncio.sleep(0.001)
    assert await used(site, "math") == content_digest(root / "math")
    site.engine.evict("math")
    assert (await site.adapters())["math"]["state"] == "loading"
    asking = asyncio.create_task(used(site, "math"))
    await asyncio.sleep(0.05)
    assert not asking.done()
    site.engine.finish("math")
    assert await asking == content_digest(root / "math-next")


async def test_a_link_may_lead_elsewhere_by_now(root: Path) -> None:
    (root / "current").symlink_to("math")
    site = Site(root)
    assert await used(site, "current") == content_digest(root / "math")
    (root / "new").symlink_to("math-next")
    (root / "new").replace(root / "current")
    site.catalogue.refresh()
    url = "/v1/adapters/current"
    while (shown := (await site.client.get(url)).json())["changed_on_disk"] is None:
        await asyncio.sleep(0.001)
    assert (shown["changed_on_disk"], shown["folder"]) == (True, "math")
    done = await site.client.patch(f"{url}?wait=true", json={"reload": True})
    assert (done.json()["changed_on_disk"], done.json()["folder"]) == (False, "math-next")
    assert await used(site, "current") == content_digest(root / "math-next")


@pytest.mark.parametrize("error", [InvariantError("a defect"), RequestTimeoutError("no answer")])
async def test_only_what_the_folder_is_to_blame_for_lasts(
    site: Site, root: Path, error: EsftError
) -> None:
    site.engine.fails["math"] = error
    assert (await site.generate("math")).status_code == error.http_status
    assert await used(site, "math") == content_digest(root / "math")


async def test_a_folder_that_nobody_watches_is_looked_at_again(tmp_path: Path) -> None:
    folder = tmp_path / "math"
    write_folder(folder, "math v1")
    site = Site(None)
    body = {"name": "math", "path": str(folder)}
    assert (await site.client.post("/v1/adapters?wait=true", json=body)).status_code == 201
    site.engine.evict("math")
    folder.rename(tmp_path / "away")
    for _ in range(2):
        assert (await site.generate("math")).status_code == 400
    num_loads = site.engine.num_loads
    assert (await site.generate("math")).status_code == 400
    assert site.engine.num_loads == num_loads
    (tmp_path / "away").rename(folder)
    assert await used(site, "math") == content_digest(folder)
