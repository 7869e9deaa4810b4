"""The safetensors header and expert_cfg.json against anything: read, or an EsftError."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file

from sgl_esft.errors import EsftError, UnsupportedModelError
from sgl_esft.formats.adapter_config import read_expert_config
from sgl_esft.formats.safetensors_header import TensorInfo, header_block, read_header


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the module, because hypothesis runs many examples within one test's own folder."""
    return tmp_path_factory.mktemp("fuzz")


def test_header_of_a_good_file(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.ones(0)}
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    header = read_header(path)
    raw = path.read_bytes()
    assert header.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        info = header.tensors[name]
        assert (f"torch.{info.dtype}", info.shape) == (str(tensor.dtype), tuple(tensor.shape))
        assert raw[info.start : info.stop] == tensor.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", ["a", "a" * 4000, "a" * 5000])
def test_tensors_of_files_that_we_write_begin_aligned(name: str, tmp_path: Path) -> None:
    tensors = {name: TensorInfo("int8", (3,), 7, 10), "z": TensorInfo("int8", (2, 1), 0, 2)}
    path = tmp_path / "x.safetensors"
    block, starts = header_block(tensors.items())
    path.write_bytes(block + b"abcde")
    header = read_header(path)
    assert header.data_start % 4096 == 0
    assert starts == {name: header.data_start, "z": header.data_start + 3}
    assert starts == {each: info.start for each, info in header.tensors.items()}
    loaded = load_file(path)
    assert loaded[name].tolist() == [97, 98, 99], "as safetensors itself reads it"
    assert loaded["z"].tolist() == [[100], [101]]


def test_the_caller_chooses_the_error(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"nothing")
    with pytest.raises(UnsupportedModelError):
        read_header(tmp_path / "x.safetensors", UnsupportedModelError)


_GOOD_FILE = save({"a": torch.zeros(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)})


def _read_or_refuse(folder: Path, raw: bytes) -> None:
    path = folder / "x.safetensors"
    path.write_bytes(raw)
    try:
        header = read_header(path)
    except EsftError:
        return
    assert sum(info.num_bytes for info in header.tensors.values()) == len(raw) - header.data_start


@given(st.binary(max_size=200))
def test_random_bytes(folder: Path, raw: bytes) -> None:
    _read_or_refuse(folder, raw)


@given(st.binary(max_size=100), st.integers(0, (1 << 64) - 1) | st.integers(0, 200))
def test_random_header(folder: Path, text: bytes, length: int) -> None:
    _read_or_refuse(folder, length.to_bytes(8, "little") + b"{" + text)


@given(st.data())
def test_mutated_file(folder: Path, data: st.DataObject) -> None:
    raw = bytearray(_GOOD_FILE)
    for _ in range(data.draw(st.integers(1, 6))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    _read_or_refuse(folder, bytes(raw[: data.draw(st.integers(0, len(raw)) | st.just(len(raw)))]))


_VALUES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["F32", "BF16", "F4", "[]"])
    | st.lists(st.integers(-2, 1 << 70) | st.booleans(), max_size=10)
)
_ENTRIES = st.dictionaries(
    st.sampled_from(["dtype", "shape", "data_offsets", "more"]), _VALUES, max_size=4
)


@given(st.dictionaries(st.text(max_size=3) | st.just("__metadata__"), _ENTRIES | _VALUES))
def test_structured_header(folder: Path, entries: dict[str, object]) -> None:
    text = json.dumps(entries).encode()
    _read_or_refuse(folder, len(text).to_bytes(8, "little") + text + bytes(24))


@given(st.dictionaries(st.text(max_size=5), _VALUES | st.dictionaries(st.text(), _VALUES)))
def test_any_expert_config_is_read_or_refused(folder: Path, config: dict[str, object]) -> None:
    path = folder / "expert_cfg.json"
    path.write_text(json.dumps({"experts": config}))
    try:
        experts = read_expert_config(path)
    except EsftError:
        return
    assert all(ids == tuple(sorted(set(ids))) and ids for ids in experts.values())
