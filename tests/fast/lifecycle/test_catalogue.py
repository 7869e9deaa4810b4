"""The scan of --adapter-root, its watcher, fingerprints and digests."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from sgl_esft.errors import AdapterFormatError
from sgl_esft.formats.manifest import AdapterManifest, content_digest
from sgl_esft.lifecycle.catalogue import Catalogue, Watcher, scan
from sgl_esft.lifecycle.folders import DigestCache, fingerprint
from tests.fast.lifecycle.site import check, touch_folder, write_folder
from tests.support.waiting import wait_until


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    return root


def test_only_folders_with_a_legal_name_and_a_config(tmp_path: Path) -> None:
    write_folder(tmp_path / "math", "v1")
    write_folder(tmp_path / "not a name", "v1")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    write_folder(tmp_path / "empty" / "inner", "v1")
    write_folder(tmp_path / "base", "v1")
    found = scan(tmp_path, check)
    assert set(found) == {"base", "math"}
    assert found["math"].error is None
    assert "means the base model" in str(found["base"].error)


def test_what_has_not_changed_is_not_checked_again(tmp_path: Path) -> None:
    checked: list[str] = []

    def counting(folder: Path) -> AdapterManifest:
        checked.append(folder.name)
        return check(folder)

    for name in ("a", "b"):
        write_folder(tmp_path / name, "v1")
    first = scan(tmp_path, counting)
    write_folder(tmp_path / "b", "broken")
    second = scan(tmp_path, counting, first)
    assert checked == ["a", "b", "b"]
    assert second["a"] is first["a"]
    assert "is broken" in str(second["b"].error)
    write_folder(tmp_path / "b", "v3")
    assert scan(tmp_path, counting, second)["b"].error is None


def test_a_root_that_cannot_be_read_keeps_what_was_seen(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_folder(root / "math", "v1")
    catalogue = Catalogue(root, check)
    catalogue.refresh()
    shutil.rmtree(root)
    catalogue.refresh()
    assert "math" in catalogue.entries
    assert "--adapter-root cannot be read" in caplog.text
    root.mkdir()
    catalogue.refresh()
    assert not catalogue.entries


def test_links(root: Path, tmp_path: Path) -> None:
    write_folder(root / "real", "v1")
    (root / "alias").symlink_to("real")
    write_folder(tmp_path / "outside", "v1")
    (root / "escape").symlink_to(tmp_path / "outside")
    found = scan(root, check)
    assert found["alias"].folder == root / "real"
    assert found["alias"].error is None
    assert "adapter root" in str(found["escape"].error)


def test_fingerprints_follow_the_files(tmp_path: Path) -> None:
    folder = tmp_path / "math"
    write_folder(folder, "v1")
    first = fingerprint(folder)
    assert fingerprint(folder) == first
    (folder / "README.md").write_text("is not the adapter")
    assert fingerprint(folder) == first
    touch_folder(folder)
    second = fingerprint(folder)
    assert second != first
    (folder / "more.safetensors").write_text("x")
    assert fingerprint(folder) not in (first, second)
    assert fingerprint(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors.index.json", "old.bin", "OLD.PT", "link"]
)
def test_a_folder_is_checked_again_without_the_file_that_it_was_refused_for(
    tmp_path: Path, name: str
) -> None:
    def refuse(folder: Path) -> AdapterManifest:
        if os.path.lexists(folder / name):
            raise AdapterFormatError(f"remove {name}")
        return check(folder)

    write_folder(tmp_path / "math", "v1")
    file = tmp_path / "math" / name
    file.symlink_to("nowhere") if name == "link" else file.write_text("{}")
    refused = scan(tmp_path, refuse)
    assert refused["math"].error is not None
    assert scan(tmp_path, refuse, refused)["math"] is refused["math"]
    file.unlink()
    assert scan(tmp_path, refuse, refused)["math"].error is None


def test_what_stays_wrong_is_said_once(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(folder: Path) -> AdapterManifest:
        raise AdapterFormatError(f"{folder.name} cannot be listed")

    write_folder(root / "math", "v1")
    catalogue = Catalogue(root, refuse)
    with pytest.MonkeyPatch.context() as patch:  # as for a folder that may not be read
        patch.setattr("sgl_esft.lifecycle.catalogue.fingerprint", lambda folder: None)
        for _ in range(3):
            catalogue.refresh()
    assert caplog.text.count("math cannot be listed") == 1
    shutil.rmtree(root)
    for _ in range(3):
        catalogue.refresh()
    assert caplog.text.count("--adapter-root cannot be read") == 1
    root.mkdir()
    catalogue.refresh()
    root.rmdir()
    catalogue.refresh()
    assert caplog.text.count("--adapter-root cannot be read") == 2


@pytest.mark.anyio
async def test_a_digest_is_read_once_for_a_fingerprint(tmp_path: Path) -> None:
    read: list[Path] = []

    def digest(folder: Path) -> str:
        read.append(folder)
        return content_digest(folder)

    write_folder(tmp_path, "v1")
    cache = DigestCache(digest)
    first = await cache.read(tmp_path)
    assert await cache.read(tmp_path) == first
    assert len(read) == 1
    touch_folder(tmp_path)
    assert cache.get(tmp_path, fingerprint(tmp_path)) is None
    cache.read_later(tmp_path)
    cache.read_later(tmp_path)
    while cache.get(tmp_path, fingerprint(tmp_path)) is None:
        await asyncio.sleep(0.001)
    assert len(read) == 2
    assert await cache.read(tmp_path) == first


@pytest.mark.parametrize("has_events", [True, False])
def test_changes_are_seen_within_two_seconds(
    tmp_path: Path, has_events: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_events:

        def no_watches(*_: object, **__: object) -> None:
            raise OSError("no inotify watches are left")

        monkeypatch.setattr("watchfiles.watch", no_watches)
    catalogue = Catalogue(tmp_path, check)
    watcher = Watcher(tmp_path, catalogue.refresh)
    watcher.start()
    try:
        rounds = [_seconds_until_seen(catalogue, tmp_path / "math") for _ in range(3)]
    finally:
        watcher.stop()
    # A busy machine only adds to it.
    assert max(map(min, zip(*rounds, strict=True))) < 2.0, rounds


def _seconds_until_seen(catalogue: Catalogue, folder: Path) -> tuple[float, float, float]:
    """Of a folder that comes, breaks and goes."""
    write_folder(folder, "v1")
    came = wait_until(lambda: folder.name in catalogue.entries)
    write_folder(folder, "broken")
    broke = wait_until(lambda: catalogue.entries[folder.name].error is not None)
    shutil.rmtree(folder)
    return came, broke, wait_until(lambda: folder.name not in catalogue.entries)


def test_a_look_that_fails_does_not_end_the_watch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    looks: list[int] = []

    def refresh() -> None:
        looks.append(1)
        raise ZeroDivisionError("a defect")

    watcher = Watcher(tmp_path, refresh)
    watcher.start()
    try:
        wait_until(lambda: len(looks) > 1, 10.0)
    finally:
        watcher.stop()
    assert "ZeroDivisionError: a defect" in caplog.text
