"""The manager in LoRA's place: all that SGLang asks of it, with SGLang's own modes and results."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_esft.config import EsftConfig
from sgl_esft.errors import (
    AdapterMismatchError,
    InvariantError,
    UnknownAdapterError,
    UnsupportedModelError,
)
from sgl_esft.formats.model_spec import read_moe_spec
from sgl_esft.plugin.lora_manager import EsftManager, GatherTags
from sgl_esft.weave.batch_tags import BASE, PADDING, BatchTags
from tests.support.adapter_factory import write_random_adapter, write_random_base
from tests.support.random_layers import Rank
from tests.support.woven_device import Device

SMALL = {"hidden_size": 16, "moe_intermediate_size": 8, "n_routed_experts": 8, "vocab_size": 300}


@dataclass(frozen=True)
class Ref:
    """SGLang's LoRARef."""

    lora_id: str
    lora_name: str | None
    lora_path: str | None
    pinned: bool | None = None


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and three adapters."""
    root = tmp_path_factory.mktemp("manager")
    write_random_base(root / "base", "DeepseekV2ForCausalLM", seed=1, **SMALL)
    for seed, name in enumerate(("math", "law", "code")):
        write_random_adapter(root / name, root / "base", seed=seed, max_experts=2)
    write_random_adapter(root / "large", root / "base", seed=9, max_experts=3)
    return root


def ref(root: Path, name: str, *, pinned: bool | None = None) -> Ref:
    return Ref(f"id-{name}", name, str(root / name), pinned)


def make_manager(
    root: Path, gather: GatherTags | None = None, num_dp_ranks: int = 1
) -> EsftManager:
    from sgl_esft import sglang_api

    config = EsftConfig(max_adapters=2, max_experts_per_adapter=2)
    spec = read_moe_spec(root / "base")
    device = Device(spec, config, Rank(), is_resident=gather is not None)
    make_result = sglang_api.make_lora_result
    tags = BatchTags(16, "cpu")
    return EsftManager(device.plane, tags, make_result, gather, num_dp_ranks=num_dp_ranks)


@pytest.fixture
def manager(root: Path) -> EsftManager:
    """Weaving on one rank, math in slot 0 and law in slot 1."""
    manager = make_manager(root)
    manager.load_initial([ref(root, "math"), ref(root, "law")])
    return manager


def batch(mode: str, lora_ids: Sequence[str | None] | None, **fields: Any) -> SimpleNamespace:
    """The parts of a ForwardBatch that say whose tokens are in it."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return SimpleNamespace(forward_mode=ForwardMode[mode], lora_ids=lora_ids, **fields)


def tags_after(manager: EsftManager, forward_batch: SimpleNamespace, num_tokens: int) -> list[int]:
    manager.prepare_lora_batch(forward_batch)
    return manager.tags.token_adapter_slots(num_tokens).tolist()


MIX = ["id-math", None, "id-law"]


@pytest.mark.parametrize(
    ("mode", "ids", "lengths", "expected"),
    [
        ("DECODE", ["id-law", None, "id-math", "id-law"], None, [1, -1, 0, 1]),
        ("EXTEND", MIX, [3, 2, 1], [0, 0, 0, -1, -1, 1]),
        ("MIXED", MIX, [3, 2, 1], [0, 0, 0, -1, -1, 1]),  # decoding requests extend by one token
        ("EXTEND", ["id-law"], [2, 4], [1, 1, -1, -1, -1, -1]),  # beyond the requests: padding
        *(("DECODE", ids, None, [-1] * len(ids or ())) for ids in (None, [], [None, None])),
    ],
)
def test_each_token_has_the_slot_of_its_request(
    manager: EsftManager, mode: str, ids: Any, lengths: list[int] | None, expected: list[int]
) -> None:
    manager.prepare_lora_batch(batch("DECODE", ["id-math", "id-math"]))
    tokens = batch(mode, ids, extend_seq_lens_cpu=lengths)
    assert tags_after(manager, tokens, len(expected)) == expected


def test_an_adapter_has_the_name_that_requests_say(manager: EsftManager) -> None:
    assert manager.name_of("id-math") == "math"
    assert manager.name_of("id-nobody") is None


def test_idle_and_reset_forget_the_last_batch(manager: EsftManager) -> None:
    manager.prepare_lora_batch(batch("DECODE", ["id-math"] * 3))
    manager.prepare_lora_batch(batch("IDLE", None))
    assert manager.tags.token_adapter_slots(3).tolist() == [-1] * 3
    manager.prepare_lora_batch(batch("DECODE", ["id-math"] * 3))
    manager.reset_lora_batch()
    assert manager.tags.token_adapter_slots(1).tolist() == [-1]


def test_an_id_that_is_not_on_the_device_is_never_taken_for_the_base(
    manager: EsftManager, root: Path
) -> None:
    with pytest.raises(InvariantError, match="id-nobody is in a batch but not on the device"):
        manager.prepare_lora_batch(batch("DECODE", [None, "id-nobody"]))
    assert manager.load_lora_adapter(ref(root, "code")).success
    with pytest.raises(InvariantError, match="id-code"):
        manager.prepare_lora_batch(batch("DECODE", ["id-code"]))


@pytest.mark.parametrize("mode", ["TARGET_VERIFY", "DRAFT_EXTEND_V2", "PREBUILT"])
def test_a_mode_that_is_not_woven_is_refused(manager: EsftManager, mode: str) -> None:
    with pytest.raises(UnsupportedModelError, match=mode):
        manager.prepare_lora_batch(batch(mode, ["id-math"], extend_seq_lens_cpu=[1]))


def test_dp_attention_tags_by_the_gather(root: Path) -> None:
    """Another rank's tokens come first; this rank's own are padded to two rows."""
    seen: list[list[int]] = []

    def gather(local: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        seen.append(local.tolist())
        assert forward_batch is current
        padded = torch.full((2,), -1, dtype=torch.int32)
        padded[: len(local)] = local
        return torch.cat([torch.tensor([1, -1], dtype=torch.int32), padded])

    manager = make_manager(root, gather)
    assert manager.attn_dp_enabled
    manager.load_initial([ref(root, "math"), ref(root, "law")])
    current = batch("DECODE", ["id-math"])
    assert tags_after(manager, current, 4) == [1, -1, 0, -1]
    current = batch("IDLE", None)
    assert tags_after(manager, current, 4) == [1, -1, -1, -1]
    assert seen == [[0], []]


class Steps:
    """In place of a sampler: which rows of each step are tokens."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def begin_step(self, real_tokens: int | torch.Tensor) -> None:
        self.seen.append(
            real_tokens.tolist() if isinstance(real_tokens, torch.Tensor) else real_tokens
        )


def test_padding_runs_as_base_and_counts_for_nobody(root: Path) -> None:
    def gather(local: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        return torch.cat([local, torch.tensor([PADDING, BASE], dtype=torch.int32)])

    manager = make_manager(root, gather)
    manager.load_initial([ref(root, "math")])
    manager.heat = steps = Steps()  # type: ignore[assignment]
    assert tags_after(manager, batch("DECODE", ["id-math"]), 3) == [0, -1, -1]
    assert steps.seen == [[True, False, True]]


def test_without_dp_attention_all_that_is_tagged_is_tokens(manager: EsftManager) -> None:
    manager.heat = steps = Steps()  # type: ignore[assignment]
    manager.prepare_lora_batch(batch("DECODE", ["id-math", None]))
    assert steps.seen == [2]
    assert not manager.attn_dp_enabled


def test_the_scheduler_asks_what_fits_and_brings_it_in(manager: EsftManager, root: Path) -> None:
    assert manager.load_lora_adapter(ref(root, "code")).success
    assert manager.validate_lora_batch({None, "id-math", "id-law"})
    assert manager.validate_lora_batch({None})
    assert not manager.validate_lora_batch({"id-math", "id-law", "id-code"})
    manager.fetch_new_loras({"id-math"})
    manager.fetch_new_loras({"id-code", None}, {"id-math", None})
    assert tags_after(manager, batch("DECODE", ["id-math", "id-code"]), 2) == [0, 1]
    with pytest.raises(UnknownAdapterError):
        manager.fetch_new_loras({"id-nobody"})


def test_load_and_unload_report_what_is_loaded(manager: EsftManager, root: Path) -> None:
    result = manager.load_lora_adapter(ref(root, "code"))
    assert result.success
    assert set(result.loaded_adapters) == {"math", "law", "code"}
    assert result.loaded_adapters["code"] == str((root / "code").resolve())
    result = manager.unload_lora_adapter(ref(root, "math"))
    assert result.success
    assert set(result.loaded_adapters) == {"law", "code"}


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (Ref("id", "large", "large"), "AdapterMismatchError: "),
        (Ref("id", "a b", "code"), "AdapterNameError: "),
        (Ref("id", None, "code"), "AdapterNameError: adapter name ''"),
        (Ref("id", "x", "nowhere"), "AdapterPathError: "),
        (Ref("id", "x", "base"), "AdapterFormatError: "),
        (Ref("id", "x", None), "AdapterPathError: "),
    ],
    ids=lambda value: str(value).partition(":")[0] if isinstance(value, str) else None,
)
def test_a_failed_load_is_named_and_changes_nothing(
    manager: EsftManager, root: Path, bad: Ref, error: str
) -> None:
    path = None if bad.lora_path is None else str(root / bad.lora_path)
    before = manager.plane.names
    result = manager.load_lora_adapter(Ref(bad.lora_id, bad.lora_name, path))
    assert not result.success
    assert result.error_message.startswith(error)
    assert result.loaded_adapters == before == manager.plane.names
    assert tags_after(manager, batch("DECODE", ["id-math", "id-law"]), 2) == [0, 1]


def test_a_pin_that_cannot_be_kept_is_named(manager: EsftManager, root: Path) -> None:
    manager.unload_lora_adapter(ref(root, "math"))
    assert manager.load_lora_adapter(ref(root, "code", pinned=True)).success
    result = manager.load_lora_adapter(ref(root, "math", pinned=True))
    assert not result.success
    assert result.error_message.startswith("NoFreeSlotError: ")


def test_an_unknown_unload_and_tensors_are_refused(manager: EsftManager, root: Path) -> None:
    code = ref(root, "code")
    unload = manager.unload_lora_adapter(code)
    tensors = manager.load_lora_adapter_from_tensors(code, {}, {}, added_tokens=None)
    for result, error in (
        (unload, "UnknownAdapterError: "),
        (tensors, "UnsupportedAdapterError: "),
    ):
        assert not result.success
        assert result.error_message.startswith(error)
        assert set(result.loaded_adapters) == {"math", "law"}


def test_a_bad_initial_adapter_stops_the_start(root: Path) -> None:
    with pytest.raises(AdapterMismatchError):
        make_manager(root).load_initial([ref(root, "math"), ref(root, "large")])


@pytest.mark.parametrize("num_dp_ranks", [1, 4])
def test_a_captured_graph_reads_the_tags_of_each_replay(root: Path, num_dp_ranks: int) -> None:
    """SGLang captures with no adapter in the batch, then replays with any."""
    gather = None if num_dp_ranks == 1 else lambda local, _: local.repeat(num_dp_ranks)
    manager = make_manager(root, gather, num_dp_ranks)
    manager.load_initial([ref(root, "math"), ref(root, "law")])
    manager.init_decode_cuda_graph_batch_info(max_bs_in_cuda_graph=20, num_tokens_per_req=2)
    manager.prepare_lora_batch(batch("DECODE", [None] * 20))
    captured = manager.tags.token_adapter_slots(40 * num_dp_ranks)
    manager.prepare_lora_batch(batch("EXTEND", ["id-math"], extend_seq_lens_cpu=[5000]))
    manager.prepare_lora_batch(batch("DECODE", ["id-law", None, "id-math"]))
    assert captured[: 3 * num_dp_ranks].tolist() == [1, -1, 0] * num_dp_ranks
    assert captured[3 * num_dp_ranks :].unique().tolist() == [-1]
    assert not manager.can_use_prefill_cuda_graph(batch("EXTEND", None))


# Asked for by prefill graphs and LoRA's own buffers, which weaving has none of.
FOR_DEVICE_GRAPHS = {"init_prefill_cuda_graph_batch_info", "init_cuda_graph_moe_buffers"}


def asked_for() -> set[str]:
    """Every attribute that SGLang reads off a model runner's `lora_manager`."""
    import sglang

    srt = Path(next(iter(sglang.__path__))) / "srt"
    files = [file for part in ("managers", "model_executor") for file in (srt / part).rglob("*.py")]
    texts = [file.read_text() for file in files]
    found = {name for text in texts for name in re.findall(r"\.lora_manager\.(\w+)", text)}
    aliased = [text for text in texts if re.search(r"\bmanager = .*\.lora_manager\n", text)]
    assert aliased
    return found | {name for text in aliased for name in re.findall(r"\bmanager\.(\w+)", text)}


def test_has_the_face_that_sglang_asks_for(manager: EsftManager) -> None:
    """Every name SGLang's own manager is asked by, callable with the same arguments."""
    from sglang.srt.lora.lora_manager import LoRAManager

    names = asked_for() - FOR_DEVICE_GRAPHS
    assert {"load_lora_adapter", "fetch_new_loras", "prepare_lora_batch"} <= names
    for name in names:
        ours, theirs = getattr(manager, name), getattr(LoRAManager, name, None)
        if callable(ours):
            signature = inspect.signature(theirs)
            required = [p for p in signature.parameters.values() if p.default is p.empty]
            inspect.signature(ours).bind(*(object() for _ in required[1:]))
            keywords = {p: object() for p in signature.parameters if p != "self"}
            inspect.signature(ours).bind(**keywords)
    assert manager.memory_pool is None
    assert manager.supports_prefill_cuda_graph is False
