"""Cases of norms and rotations for kernels of any backend."""

import hypothesis.strategies as st
import torch
from torch import Tensor

from lorikeet.kernels.interface import Batch, HeadNorms, RotaryPairs, Rotation, kv_view
from lorikeet.kernels.reference import ReferenceKernels, split_heads

REFERENCE = ReferenceKernels()

head_norms = st.sampled_from(["", "heads", "heads with offset", "whole"])

kinds_of_pairs = st.sampled_from(["halves", "partial halves", "neighbours", "partial neighbours"])


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Heads:
    """Random queries, keys and values of some rows, and where they go."""

    def __init__(
        self, rows: int, heads: int, kv_heads: int, head_dim: int, norms: str, pairs: str, dtype: torch.dtype, seed: int
    ) -> None:
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.qkv = random(rows, (heads + 2 * kv_heads) * head_dim, dtype=dtype, seed=4 * seed)
        dims = max(2, head_dim // 4 * 2) if "partial" in pairs else head_dim
        angle = random(rows, head_dim // 2, dtype=torch.float32, seed=4 * seed + 1) * 3
        angle[:, dims // 2 :] = 0
        angle = angle.repeat(1, 2)
        self.pairs = RotaryPairs(dims, "neighbours" in pairs)
        self.cos = angle.cos().to(dtype)
        self.sin = angle.sin().to(dtype)
        sizes = (heads * head_dim, kv_heads * head_dim) if "whole" in norms else (head_dim, head_dim)
        weights = (random(size, dtype=dtype, seed=4 * seed + i) for i, size in zip((2, 3), sizes, strict=True))
        self.norms = HeadNorms(*weights, 1e-5, float("offset" in norms), "whole" in norms) if norms else None
        none = torch.zeros(0, dtype=torch.int64)
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(4))
        self.batch = Batch(none, none, order // 4, order % 4, none, none, none, none)

    def run(self, backend: ReferenceKernels, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the rotated queries, and the arena."""
        blocks = len(self.qkv) // 4 + 1
        arena = torch.zeros(blocks, 2 * 2 * 4 * self.kv_heads * self.head_dim, dtype=dtype)
        kv = kv_view(arena, 2, 4, self.kv_heads, self.head_dim)
        qkv = self.qkv.to(dtype, copy=True)
        norms = self.norms and self.norms._replace(q=self.norms.q.to(dtype), k=self.norms.k.to(dtype))
        rotation = Rotation(self.cos.to(dtype), self.sin.to(dtype), self.pairs)
        backend.rotary_store(qkv, rotation, kv[1], self.batch, norms)
        return qkv[:, : qkv.shape[1] - 2 * self.kv_heads * self.head_dim], arena


class ExactNorms(ReferenceKernels):
    """The reference in fp64, its norms too."""

    def rotary_store(self, qkv, rotation, kv, batch, norms) -> None:  # type: ignore[no-untyped-def]
        if norms is not None:
            for heads, weight in zip(split_heads(qkv, kv)[:2], (norms.q, norms.k), strict=True):
                x = heads.flatten(1) if norms.is_whole else heads
                normed = x / (x.square().mean(-1, keepdim=True) + norms.eps).sqrt() * (weight + norms.offset)
                heads[:] = normed.view(heads.shape)
        super().rotary_store(qkv, rotation, kv, batch, None)
