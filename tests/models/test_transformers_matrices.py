"""The probe finds the matrices that multiply every row once, and products with them may be replaced."""

from contextlib import ExitStack

import pytest
import torch
from torch import Tensor, nn

from lorikeet.models.transformers_matrices import MatrixProbe, StandIn

ROWS = 5


class Router(nn.Module):
    """Uses its matrix in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8))
        self.bias = nn.Parameter(torch.randn(4))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "some rows":
            return nn.functional.linear(x[:2], self.weight)
        if self.way == "twice":
            return nn.functional.linear(x, self.weight) + nn.functional.linear(x, self.weight)
        if self.way == "normalised":
            return nn.functional.linear(x, self.weight / self.weight.norm())
        if self.way == "in a list":
            return nn.functional.linear(x, self.weight) + torch.cat([self.weight, self.weight]).sum()
        return nn.functional.linear(x.double(), self.weight.type(torch.float64), bias=self.bias.double())


@pytest.mark.parametrize(
    ("way", "is_found"),
    [("once", True), ("some rows", False), ("twice", False), ("normalised", False), ("in a list", False)],
)
def test_only_matrices_of_one_product_of_all_rows_are_found(way: str, is_found: bool) -> None:
    decoder = nn.ModuleDict({"layers": nn.ModuleList([Router(way)])})
    router = decoder.get_submodule("layers.0")
    x = torch.randn(ROWS, 8)
    expected = router(x)
    probe = MatrixProbe(decoder)
    with ExitStack() as hooks:
        probe.begin(hooks)
        assert torch.equal(router(x), expected)
    assert torch.equal(router(x), expected)
    assert isinstance(router.weight, nn.Parameter)
    found = probe.found("model.", ROWS)
    assert [each.name for each in found] == (["model.layers.0.weight"] if is_found else [])
    assert all((each.path, each.layer) == ("layers.{}", 0) for each in found)


def test_a_product_is_given_to_the_function_also_after_a_conversion() -> None:
    weight = torch.randn(4, 8)
    seen: list[tuple[torch.dtype, type]] = []

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        seen.append((weight.dtype, type(weight)))
        return nn.functional.linear(x, weight, bias) + 1

    stand_in = StandIn.of(weight, product)
    x = torch.randn(ROWS, 8)
    assert torch.equal(nn.functional.linear(x, stand_in), nn.functional.linear(x, weight) + 1)
    wide = nn.functional.linear(x.double(), stand_in.to(torch.float64))
    assert torch.equal(wide, nn.functional.linear(x.double(), weight.double()) + 1)
    assert seen == [(torch.float32, Tensor), (torch.float64, Tensor)]
