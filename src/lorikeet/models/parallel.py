"""The ranks that share one model.

Each rank has a part of every layer (tensor parallelism, https://arxiv.org/abs/1909.08053), or whole layers (pipeline
parallelism), or a part of the layers of one stage.
"""

from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from torch import Tensor


class RankGroup(Protocol):
    """The ranks of one engine.

    Every rank must make the same calls in the same order.

    Attributes:
        number: number of the rank among all ranks. Rank 0 is in the last stage, so that it has the output layer and
            samples.
        rank: tensor-parallel rank within its stage.
        size: number of tensor-parallel ranks of a stage.
        stage: pipeline stage; stage 0 has the embedding.
        stages: number of pipeline stages.
    """

    number: int
    rank: int
    size: int
    stage: int
    stages: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` over the ranks of the stage; ``x`` itself may be overwritten."""
        ...

    def send(self, x: Tensor) -> None:
        """Send ``x`` to the next stage."""
        ...

    def receive(self, x: Tensor) -> Tensor:
        """Overwrite ``x`` with the tensor that the previous stage sends, and return ``x``."""
        ...

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Overwrite ``tensor`` with the tensor of rank ``src``, and return ``tensor``."""
        ...


class SingleRankGroup:
    """A group of one rank, which holds the whole model."""

    number: int = 0
    rank: int = 0
    size: int = 1
    stage: int = 0
    stages: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return ``x``."""
        return x

    def send(self, x: Tensor) -> None:
        """Do nothing, since this is the only stage."""

    def receive(self, x: Tensor) -> Tensor:
        """Return ``x``."""
        return x

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Return ``tensor``."""
        return tensor


class NoReduceGroup(SingleRankGroup):
    """One of several ranks that computes alone for measurements.

    Its results are meaningless.

    Args:
        group: the rank's group.
    """

    def __init__(self, group: RankGroup) -> None:
        self.number = group.number
        self.rank = group.rank
        self.size = group.size
        self.stage = group.stage
        self.stages = group.stages


class DistributedRankGroup:
    """Ranks in separate processes, connected by ``torch.distributed`` (gloo on CPU, nccl on CUDA)."""

    def __init__(
        self,
        number: int,
        size: int,
        init_method: str,
        backend: str = "gloo",
        timeout_s: float = 300.0,
        *,
        stages: int = 1,
    ) -> None:
        """Join the group.

        Returns when all ranks have joined.

        Args:
            number: number of this process's rank, from 0.
            size: number of tensor-parallel ranks of a stage.
            init_method: rendezvous address, e.g. ``tcp://127.0.0.1:29500`` or ``file:///...``.
            backend: ``gloo`` or ``nccl``.
            timeout_s: seconds after which a call fails if other ranks have not made the same call.
            stages: number of pipeline stages.
        """
        timeout = timedelta(seconds=timeout_s)
        ranks = size * stages
        dist.init_process_group(backend, init_method=init_method, rank=number, world_size=ranks, timeout=timeout)
        self.number = number
        self.rank = number % size
        self.size = size
        self.stage = stages - 1 - number // size
        self.stages = stages
        # Every rank must create every group, in the same order.
        firsts = range(0, ranks, size) if size < ranks else ()
        groups = {first: dist.new_group(list(range(first, first + size)), timeout=timeout) for first in firsts}
        self._stage_group = groups.get(number - self.rank)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum ``x`` over the ranks of the stage in place, and return ``x``. All ranks get the same bits."""
        if self.size > 1 and x.numel():  # A step without sample rows has no rows left after the last attention.
            dist.all_reduce(x, group=self._stage_group)
        return x

    def send(self, x: Tensor) -> None:
        """Send ``x`` to the rank of the next stage that has the same part of every layer."""
        dist.send(x, self.number - self.size)

    def receive(self, x: Tensor) -> Tensor:
        """Overwrite ``x`` with the tensor of the corresponding rank of the previous stage, and return ``x``."""
        dist.recv(x, self.number + self.size)
        return x

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Overwrite ``tensor`` with the tensor of rank ``src``, and return ``tensor``."""
        dist.broadcast(tensor, src)
        return tensor

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()
