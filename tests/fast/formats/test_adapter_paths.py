"""Names and folders from clients: accepted, or refused without telling more than was given."""

from pathlib import Path

import pytest

from sgl_esft.errors import AdapterNameError, AdapterPathError
from sgl_esft.formats.adapter_paths import resolve_adapter_path, validate_adapter_name


@pytest.mark.parametrize("name", ["a", "math-v1.2_x", "...", "A" * 64])
def test_good_name(name: str) -> None:
    assert validate_adapter_name(name) == name


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "a\n", "a:b", "ä", "a b", "٣", "A" * 65, "a\0", 3, None]
)
def test_bad_name(name: object) -> None:
    with pytest.raises(AdapterNameError):
        validate_adapter_name(name)


def test_path_inside_root(tmp_path: Path) -> None:
    (tmp_path / "root" / "a").mkdir(parents=True)
    (tmp_path / "root" / "link").symlink_to("a")
    root, expected = tmp_path / "root", (tmp_path / "root" / "a").resolve()
    for path in ("a", "./a", "link", "x/../a", str(root / "a")):
        assert resolve_adapter_path(path, root) == expected
    assert resolve_adapter_path(str(root / "link"), None) == expected


def test_path_outside_root_tells_nothing(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (tmp_path / "outside").mkdir()
    (tmp_path / "root-sibling").mkdir()
    root.mkdir()
    (root / "link").symlink_to(tmp_path / "outside")
    given = ["../outside", "../missing", "link", str(tmp_path / "root-sibling"), "/", "/missing"]
    messages = set()
    for path in given:
        with pytest.raises(AdapterPathError) as caught:
            resolve_adapter_path(path, root)
        messages.add(str(caught.value).replace(repr(path), "<path>"))
    assert len(messages) == 1, "existing and missing folders outside the root must look the same"
    assert str(tmp_path) not in messages.pop()


@pytest.mark.parametrize("path", ["missing", "", "a\0b", "file", "file/x", "x" * 5000, "link"])
@pytest.mark.parametrize("with_root", [False, True])
def test_bad_path(
    path: str, with_root: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("link")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AdapterPathError) as caught:
        resolve_adapter_path(path, tmp_path if with_root else None)
    assert str(tmp_path) not in str(caught.value)
    assert len(str(caught.value)) < 400
