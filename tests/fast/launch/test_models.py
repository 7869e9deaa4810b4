"""What the base model is called."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_esft_launch.models import served_name


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("models/lite", "lite"),
        ("models/v2:lite", "v2-lite"),
        ("hub/models--deepseek-ai--V2-Lite/snapshots/0c5f", "deepseek-ai/V2-Lite"),
    ],
)
def test_a_folder_is_called_by_its_name(folder: str, name: str, tmp_path: Path) -> None:
    (tmp_path / folder).mkdir(parents=True)
    assert served_name(str(tmp_path / folder)) == name
    assert served_name(f"{tmp_path / folder}/") == name


def test_what_is_no_folder_keeps_its_name() -> None:
    assert served_name("deepseek-ai/V2-Lite") is None
    assert served_name("/") is None
