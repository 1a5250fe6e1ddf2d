"""Memory under tensor parallelism: engines report one rank's, and sizes of adapters are over all ranks."""

from types import SimpleNamespace
from typing import cast

import pytest

from lorikeet.client.supervisor import EngineSupervisor
from lorikeet.cluster.build import build_placement
from lorikeet.cluster.controller.replica import LiveReplica
from lorikeet.cluster.open import cluster_options
from lorikeet.cluster.routing.fleet import Fleet
from lorikeet.config import EngineSettings, ExecutorKind, ModelSettings, Settings
from lorikeet.core.ids import ReplicaId
from lorikeet.costs.catalog import load_profile
from lorikeet.presets import PRESETS
from tests.support.fake_engines import HELLO
from tests.support.fleets import ask
from tests.support.placement import DEMANDS_B, replicas_of

RANK_TOKEN_BYTES = HELLO.block_bytes // HELLO.block_size


@pytest.mark.parametrize(
    ("engine", "ranks"),
    [
        (EngineSettings(), 1),
        (EngineSettings(tensor_parallel=2), 2),
        (EngineSettings(tensor_parallel=4), 4),
        (EngineSettings(tensor_parallel=4, executor=ExecutorKind.PACED), 1),
    ],
)
def test_an_adapter_takes_the_room_of_as_many_tokens_as_on_each_of_its_ranks(
    engine: EngineSettings, ranks: int
) -> None:
    supervisor = cast(EngineSupervisor, SimpleNamespace(replica=ReplicaId("a"), engine_info=HELLO))
    fleet = Fleet()
    fleet.join(LiveReplica(supervisor).info(engine))
    asked = ask("1", 8, "x", known_tokens=100, adapter_bytes=ranks * 10 * RANK_TOKEN_BYTES)
    assert fleet.needed_tokens(asked, fleet.is_warm(asked.adapter)).tolist() == [110]


@pytest.mark.parametrize("ranks", [2, 4])
def test_burst_tolerance_counts_on_the_memory_of_all_ranks(ranks: int) -> None:
    """With half of what all adapters take on each rank there is room for all of them everywhere, or for few."""
    profile, needed_bytes = load_profile("a100-80-llama-2-7b"), sum(demand.size_bytes for demand in DEMANDS_B)

    def pairs(tensor_parallel: int, memory_bytes: int) -> int:
        engine = EngineSettings(profile=profile.name, tensor_parallel=tensor_parallel, memory_bytes=memory_bytes)
        options = cluster_options(Settings(ModelSettings(), engine))
        placement = build_placement(PRESETS["dlora"], profile, options)
        return len(list(placement.place(DEMANDS_B, replicas_of(4), 0.0).pairs()))

    assert pairs(ranks, needed_bytes // 2) == pairs(1, ranks * (needed_bytes // 2)) > pairs(1, needed_bytes // 2)
