"""Prepares adapters: computes the extras that depend on the base model's weights."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from lorikeet.core.geometry import ROW_PARALLEL
from lorikeet.kernels.extras import ProductShare, prepare_product, prepare_vocabulary
from lorikeet.kernels.interface import Kernels
from lorikeet.kernels.lora import LoraTargets, LoraWeights
from lorikeet.models.config import ModelConfig
from lorikeet.models.layer_ops import DecoderLayer, Product
from lorikeet.models.parallel import RankGroup
from lorikeet.models.weights import DecoderWeights


def product_shares(
    config: ModelConfig, targets: Mapping[str, LoraTargets], group: RankGroup
) -> dict[str, ProductShare | None]:
    """Return a rank's share of each product; None for each if the rank computes all products alone."""
    if group.size == 1:
        return dict.fromkeys(targets)
    shares: dict[str, ProductShare | None] = {}
    for product, columns in targets.items():
        modules = {target.module for target in columns.each}
        outputs = {name: config.module_shard(name, group.rank, group.size).outputs for name in modules}
        if modules <= ROW_PARALLEL:
            shares[product] = ProductShare(outputs, total=group.all_reduce, adds_bias=group.rank == 0)
        else:
            shares[product] = ProductShare(outputs)
    return shares


class AdapterPreparation:
    """Prepares adapters for a decoder.

    Args:
        layers: the decoder's layers.
        weights: all weights of the rank.
        kernels: the kernel backend.
        shares: the rank's share of each product.
    """

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        weights: DecoderWeights,
        kernels: Kernels,
        shares: Mapping[str, ProductShare | None],
    ) -> None:
        self._products = [product for layer in layers for product in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        self._weights = weights
        self._kernels = kernels
        self._shares = shares
        self._norms: dict[tuple[int, str], Tensor] = {}

    @torch.inference_mode()
    def prepare(self, adapter: LoraWeights) -> None:
        """Compute the extras of an adapter that depend on the base, and write them to the adapter's blocks."""
        for product in self._products:
            assert product.targets is not None
            prepare_product(
                adapter,
                product.layer,
                product.targets,
                product.bias,
                partial(self._times_weight, product),
                partial(self._row_norms, product),
                self._shares[product.name],
            )
        head = self._weights.lm_head
        prepare_vocabulary(
            adapter,
            self._weights.embedding,
            lambda x: self._kernels.logits(x, head),
            lambda: self._kernels.row_norms(head),
        )

    def _times_weight(self, product: Product, x: Tensor) -> Tensor:
        return self._kernels.linear(x, product.weight, None)

    def _row_norms(self, product: Product) -> Tensor:
        """Return the norms of a weight's rows, computed once."""
        key = product.layer, product.name
        if key not in self._norms:
            self._norms[key] = self._kernels.row_norms(product.weight)
        return self._norms[key]
