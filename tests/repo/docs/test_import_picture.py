"""docs/architecture.md's picture has the rooms and arrows of the code, and says which are late."""

from __future__ import annotations

from graphlib import CycleError

import pytest

from scripts import import_picture
from tests.repo.tree import ROOT

SOURCES = {
    "sgl_esft": "from sgl_esft.a import x",
    "sgl_esft.errors": "",
    "sgl_esft.top": "import sgl_esft.b.one",
    "sgl_esft.a": "",
    "sgl_esft.a.one": "from sgl_esft import errors, top\nfrom sgl_esft_kernels import op",
    "sgl_esft.b": "",
    "sgl_esft.b.one": "def f():\n    from sgl_esft.a import one\nfrom sgl_esft.b import two",
    "sgl_esft.b.two": "if TYPE_CHECKING:\n    import sgl_elastic.runtime",
    "sgl_esft_kernels": "",
    "sgl_esft_kernels.op": "",
}
ARROWS = """\
sgl_esft.a --> sgl_esft.top
sgl_esft.a --> sgl_esft_kernels
sgl_esft.b ..> sgl_esft.a
sgl_esft.top --> sgl_esft.b"""


def test_picture_is_that_of_the_imports() -> None:
    """Else: python -m scripts.import_picture."""
    arrows = import_picture.room_imports(import_picture.read_sources())
    assert import_picture.listed_in(import_picture.PICTURE.read_text()) == (
        import_picture.listing(arrows)
    )
    assert import_picture.levels(arrows)
    assert "(pictures/architecture.svg)" in (ROOT / "docs" / "architecture.md").read_text()


def test_rooms_late_imports_and_circles_are_told_apart() -> None:
    arrows = import_picture.room_imports(SOURCES)
    assert import_picture.listing(arrows) == ARROWS
    with pytest.raises(CycleError, match="cycle"):
        import_picture.levels(arrows)
    del arrows["sgl_esft.b", "sgl_esft.a"]
    assert import_picture.levels(arrows)["sgl_esft.a"] == 2


def test_an_arrow_that_others_make_is_not_drawn() -> None:
    arrows = dict.fromkeys([("a", "b"), ("b", "c"), ("a", "c")], import_picture.EARLY)
    assert set(import_picture.shown(arrows)) == {("a", "b"), ("b", "c")}
