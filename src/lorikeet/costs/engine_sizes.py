"""Defines the sizes, abilities and measured costs of an executor."""

from typing import NamedTuple

from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.messages import BaseInfo
from lorikeet.costs.assist_costs import AssistCosts
from lorikeet.costs.iteration_costs import IterationCosts


class ImageSizes(NamedTuple):
    """Describes the images that an executor takes in prompts.

    Attributes:
        token_bytes: bytes of the embeddings of one token of an image.
        whole_images, whole_prompts: see ``SchedulerLimits``.
    """

    token_bytes: int
    whole_images: bool
    whole_prompts: bool


class EngineSizes(NamedTuple):
    """Holds the sizes and abilities of an executor, for the engine and its clients.

    Attributes:
        geometry: sizes of the whole model.
        local_geometry: sizes of one rank's share, with which adapters are packed.
        total_blocks: blocks in the device arena of each rank.
        host_blocks: blocks in the host arena of each rank.
        block_size: tokens of KV in a block.
        max_model_len: number of tokens of the longest sequence that the executor serves.
        max_adapter_blocks: blocks of the largest adapter that leaves enough blocks for such a sequence.
        kernels: name of the kernel backend.
        assist: costs of prefills assisted by host workers; None if there are no workers.
        async_scheduling: whether the device can run a decode step while the host handles the previous step's tokens.
        iterations: profiled times of iterations and merges; None without a profile.
        weights: form of the linear weights, in words; empty if the executor computes nothing.
        base: the base model; None if the executor computes nothing.
        can_merge: whether an adapter can be merged into the base weights.
        images: sizes of images; None if prompts have none.
    """

    geometry: ModelGeometry
    local_geometry: ModelGeometry
    total_blocks: int
    host_blocks: int
    block_size: int
    max_model_len: int
    max_adapter_blocks: int
    kernels: str
    assist: AssistCosts | None = None
    async_scheduling: bool = False
    iterations: IterationCosts | None = None
    weights: str = ""
    base: BaseInfo | None = None
    can_merge: bool = True
    images: ImageSizes | None = None

    @property
    def block_bytes(self) -> int:
        """Number of bytes of a block on one rank."""
        return self.local_geometry.block_bytes(self.block_size)
