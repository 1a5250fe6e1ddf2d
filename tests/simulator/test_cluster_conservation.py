"""Whatever the fleet, the policies and the load: every request of a simulated cluster ends once, and whole."""

import math

import numpy as np
import pytest

from lorikeet.cluster.adapters.copy_times import CopyCosts, FetchForm
from lorikeet.cluster.build import MigrationCosts, build_routing
from lorikeet.cluster.migration.problem import MoveTimes
from lorikeet.cluster.placement.base import PlacementPolicy
from lorikeet.cluster.placement.everywhere import FullReplication
from lorikeet.cluster.setup import ClusterOptions
from lorikeet.papers.loraserve.placement import ContiguousPlacement, RandomPlacement
from lorikeet.presets import Preset
from lorikeet.workloads.workload import WorkloadRequest
from tests.support.clusters import BLOCK, settings, simulated, some_adapters
from tests.support.policies import policy_values
from tests.support.profiles import round_profile


class Restless(RandomPlacement):
    """Deals adapters anew with every placement."""

    def place(self, demands, replicas, now):  # type: ignore[no-untyped-def]
        self._homes = {}
        return super().place(demands, replicas, now)


def placement_of(kind: int, seed: int) -> PlacementPolicy:
    return (FullReplication(), RandomPlacement(seed), ContiguousPlacement(), Restless(seed))[kind % 4]


@pytest.mark.slow
@pytest.mark.sampled(20)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("routing", policy_values("routing"))
def test_every_request_ends_once_and_whole(routing: str, seed: int) -> None:
    number = policy_values("routing").index(routing) + seed
    generator = np.random.default_rng((seed, number))
    replicas, adapters = int(generator.integers(1, 5)), some_adapters(8)
    asked = [None, *(ref.name for ref in adapters)]
    workload = [
        WorkloadRequest(
            float(at_s),
            asked[generator.integers(len(asked))],
            *generator.integers(1, [150, 60]).tolist(),
            prefix_blocks=tuple(generator.integers(0, 3, 2).tolist()),
            conversation=str(generator.integers(6)),
        )
        for at_s in np.sort(generator.uniform(0, 8, 70))
    ]
    kv = (lambda: 1e5) if seed == 2 else None  # whether it travels where it is sooner
    policy = build_routing(Preset(routing=routing), round_profile(), ClusterOptions(seed=seed, tpot_s=0.05))
    found = simulated(
        workload,
        replicas,
        adapters,
        of=settings(
            memory_bytes=32 * BLOCK * int(generator.integers(70, 120)),
            host_memory_bytes=32 * BLOCK * 100,
            max_num_seqs=int(generator.integers(2, 20)),
            num_scheduler_steps=(1, 4)[seed % 2],
            preset=("lorikeet:plain", "toppings:s-lora", "elora")[number % 3],
        ),
        routing=policy,
        placement=placement_of(number, seed),
        period_s=1.0,
        prefetch=bool(number % 2),
        copies=CopyCosts(list(FetchForm)[seed % 2], network_bytes_per_s=2e3, drive_bytes_per_s=1e3),
        provisioned=seed != 1,
        migration=MigrationCosts(MoveTimes(lambda tokens: 1e-3 * tokens, math.inf, 32.0, kv), 0.0) if seed else None,
    )
    assert found.finished == list(range(1, 71))
    assert [each.error for each in found.run.exchanges] == [None] * 70
    assert [each.output_tokens for each in found.run.exchanges] == [each.output_tokens for each in workload]
    for each in found.run.exchanges:
        assert each.ended_s >= each.token_times_s[-1] >= each.token_times_s[0] > each.sent_s >= each.due_s
    assert sum(each.output_tokens for each in found.figures.replicas) == sum(each.output_tokens for each in workload)
    assert not any(replica.engine.has_requests for replica in found.replicas)
