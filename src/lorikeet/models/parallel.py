"""The ranks that share one model (tensor parallelism, https://arxiv.org/abs/1909.08053)."""

from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from torch import Tensor


class RankGroup(Protocol):
    """The tensor-parallel ranks of one engine. Every rank must make the same calls in the same order."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` over all ranks; ``x`` itself may be overwritten."""
        ...

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Overwrite ``tensor`` with that of rank ``src``, and return it."""
        ...


class SingleRankGroup:
    """A group of one rank, which holds the whole model."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return ``x``."""
        return x

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Return ``tensor``."""
        return tensor


class NoReduceGroup:
    """A rank of several that computes without the others, for measurements; its results are meaningless.

    Args:
        group: the group of the rank.
    """

    def __init__(self, group: RankGroup) -> None:
        self.rank, self.size = group.rank, group.size

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return ``x``."""
        return x

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Return ``tensor``."""
        return tensor


class DistributedRankGroup:
    """Ranks in separate processes, connected by ``torch.distributed`` (gloo on CPU, nccl on CUDA)."""

    def __init__(self, rank: int, size: int, init_method: str, backend: str = "gloo", timeout_s: float = 300.0) -> None:
        """Join the group; returns when all ranks have joined.

        Args:
            rank: rank of this process, from 0.
            size: number of ranks.
            init_method: rendezvous address, e.g. ``tcp://127.0.0.1:29500`` or ``file:///...``.
            backend: ``gloo`` or ``nccl``.
            timeout_s: time after which a call fails if other ranks have not made it.
        """
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=size, timeout=timeout)
        self.rank = rank
        self.size = size

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum ``x`` over all ranks in place, and return it. All ranks get the same bits."""
        if x.numel():  # a step without sample rows has none left after the last attention
            dist.all_reduce(x)
        return x

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Overwrite ``tensor`` with that of rank ``src`` and return it."""
        dist.broadcast(tensor, src)
        return tensor

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()
