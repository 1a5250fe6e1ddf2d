"""Plans assisted prefills: decides which prefills host cores assist, and the load order of their adapters."""

from functools import lru_cache

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest, AdapterName
from lorikeet.core.plan import PACKING_ORDER, LoadOrder
from lorikeet.costs.assist_costs import AssistCosts, AssistRecord
from lorikeet.costs.engine_sizes import EngineSizes
from lorikeet.memory.packing import block_runs, pack
from lorikeet.presets import ColdStart
from lorikeet.scheduling.engine_load import EngineLoad

_Ranks = tuple[tuple[str, tuple[int, ...]], ...]
_CACHE_SIZE = 1024
"""Largest number of cached entries.

The cache is keyed by an adapter's ranks, which may differ on every layer of every version.
"""


class AssistPlanner:
    """Decides whether host cores assist a prefill, and plans the load order of its adapter.

    The plan covers only the first chunk of the prompt, because an adapter arrives within one or two chunks, and a
    shorter first chunk shortens the whole prefill.

    Args:
        costs: costs of assisted prefills.
        sizes: sizes of the executor.
        max_num_batched_tokens: token limit of a step.
        cold_start: the preset's option. ``ASSIST`` assists whenever possible, and ``AUTO`` only if assistance saves
            time.
        load: sequences of the engine, which assistance would delay.

    Attributes:
        costs: costs of assisted prefills.
        record: compares the durations of cold prefills with their predictions.
    """

    def __init__(
        self,
        costs: AssistCosts,
        sizes: EngineSizes,
        max_num_batched_tokens: int,
        cold_start: ColdStart,
        load: EngineLoad,
    ) -> None:
        self.costs = costs
        self.record = AssistRecord()
        self._geometry = sizes.local_geometry
        self._block_elements = self._geometry.block_elements(sizes.block_size)
        self._max_tokens = max_num_batched_tokens
        self._cold_start = cold_start
        self._load = load
        self._planned = lru_cache(_CACHE_SIZE)(self._plan)

    def load_order(self, ref: AdapterRef, tokens: int) -> LoadOrder:
        """Return the order in which an adapter is loaded for a prefill of this many tokens.

        Returns:
            ``PACKING_ORDER`` if host cores do not assist the prefill.
        """
        tokens = min(tokens, self._max_tokens)
        if not self._assists(ref, tokens):
            return PACKING_ORDER
        # Layer groups depend only on these numbers
        return self._planned(tuple(ref.ranks.items()), 1 << (tokens - 1).bit_length())

    def _assists(self, ref: AdapterRef, tokens: int) -> bool:
        if self._cold_start is ColdStart.ASSIST:
            return self.costs.can_assist(ref)
        if self._cold_start is not ColdStart.AUTO:
            return False
        return self.costs.pays(
            ref,
            tokens,
            self.record.ratio,
            delay_per_lost_second=self._load.delay_per_lost_second(excluded=1),
            step_s=self._load.fixed_step_s,
        )

    def _plan(self, ranks: _Ranks, tokens: int) -> LoadOrder:
        ref = AdapterRef(AdapterName(""), AdapterDigest(""), "", dict(ranks), 0)
        groups = self.costs.layer_groups(ref, tokens)
        runs = block_runs(pack(ref.ranks, self._geometry, self._block_elements), groups)
        return LoadOrder(runs, groups[-1] if self.costs.is_static else (0, 0))
