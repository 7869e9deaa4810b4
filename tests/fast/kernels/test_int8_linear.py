"""The int8 layer's operator: exact, alike in every batch, named errors; elsewhere torch's."""

from __future__ import annotations

import pytest
import torch

from sgl_esft.platform import quantised_moe
from sgl_esft_kernels import reroute_cpu

native = reroute_cpu.int8_linear()
needs_avx512 = pytest.mark.skipif(native is None, reason="the processor has no AVX-512")


def layer(num_tokens: int, size_in: int = 176, size_out: int = 97) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, size_in, generator=generator).bfloat16()
    w = torch.randint(-127, 128, (size_out, size_in), generator=generator, dtype=torch.int8)
    return x, w, torch.rand(size_out, generator=generator)


@needs_avx512
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 64])
def test_it_is_the_product(num_tokens: int) -> None:
    assert native is not None
    x, w, scale = layer(num_tokens)
    found = native(x, w, scale)
    assert found.dtype == torch.float32
    exact = (x.double() @ w.double().T) * scale.double()
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-3)


@needs_avx512
def test_a_token_and_a_thread_change_nothing() -> None:
    """Rows are shared out among threads; a token's result is its own."""
    assert native is not None
    x, w, scale = layer(13, size_out=2000)
    whole = native(x, w, scale)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert torch.equal(native(x, w, scale), whole)
        for token in range(13):
            assert torch.equal(native(x[token : token + 1], w, scale)[0], whole[token])
    finally:
        torch.set_num_threads(num_threads)


def broken() -> dict[str, tuple[torch.Tensor, ...]]:
    x, w, scale = layer(2)
    return {
        "a size that is not the weight's": (x[:, :-1].contiguous(), w, scale),
        "a scale too few": (x, w, scale[:-1]),
        "a scale in another dtype": (x, w, scale.double()),
        "numbers in another dtype": (x, w.to(torch.uint8), scale),
        "inputs that are no numbers of the model": (x.to(torch.int32), w, scale),
        "a view with gaps": (x, torch.cat([w, w], 1)[:, : w.shape[1]], scale),
        "a third dimension": (x[None], w, scale),
    }


@needs_avx512
@pytest.mark.parametrize("why", broken())
def test_other_tensors_are_refused(why: str) -> None:
    assert native is not None
    with pytest.raises(ValueError, match="int8_linear: a tensor has"):
        native(*broken()[why])


def test_without_avx512_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Close, and not to the bit: torch rounds its sums to bfloat16."""
    x, w, scale = layer(3, size_in=128, size_out=64)
    here = quantised_moe._by_int8(x, w, scale[:, None])
    monkeypatch.setattr(reroute_cpu, "int8_linear", lambda: None)
    elsewhere = quantised_moe._by_int8(x, w, scale[:, None])
    torch.testing.assert_close(here, elsewhere, rtol=2**-7, atol=0.5)
    assert (native is None) == torch.equal(here, elsewhere)
