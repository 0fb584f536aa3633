"""Products with weights in whichever layout this CPU multiplies."""

from __future__ import annotations

import pytest
import torch

from forebay_engine.model import linear
from forebay_engine.model.linear import PackedLinear, PlainLinear, can_pack, make_linear, min_rows

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_that_of_its_weight(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    weight, x = torch.randn(24, 16, generator=generator).to(dtype), torch.randn(8, 16, generator=generator).to(dtype)
    bias = torch.randn(24, generator=generator).to(dtype)
    exact = x.double() @ weight.double().t() + bias.double()
    assert torch.allclose(make_linear(weight, bias)(x).double(), exact, rtol=2e-2, atol=6e-2)


def test_bfloat16_stays_as_it_is_where_onednn_can_not_pack_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "packs_bfloat16", lambda: False)
    assert isinstance(make_linear(torch.ones(4, 4, dtype=torch.bfloat16)), PlainLinear)
    assert min_rows(CPU, torch.bfloat16) == 1
    if can_pack(CPU, torch.float32):
        assert isinstance(make_linear(torch.ones(4, 4)), PackedLinear)
