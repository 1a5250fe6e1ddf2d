"""Times of adapter copies: the figures of LoRAServe's setting, and waits for links."""

import pytest

from lorikeet.cluster.adapters.copy_times import CopyCosts, CopyTimes, FetchForm
from lorikeet.core.ids import ReplicaId

RANK_128 = 256 << 20
"""Bytes of an adapter of rank 128 for a model of 7B parameters."""

A, B = ReplicaId("a"), ReplicaId("b")


def test_a_pipelined_fetch_takes_about_as_long_as_a_load() -> None:
    costs = CopyCosts()
    assert costs.local_s(RANK_128) == pytest.approx(RANK_128 / 25e9)
    assert costs.link_s(RANK_128) == pytest.approx(50e-6 + RANK_128 / 24e9)
    assert costs.fetch_s(RANK_128) + costs.local_s(RANK_128) == pytest.approx(costs.link_s(RANK_128))


def test_a_network_faster_than_the_host_costs_its_latency() -> None:
    assert CopyCosts(network_bytes_per_s=100e9).fetch_s(RANK_128) == pytest.approx(50e-6)


def test_store_and_forward_adds_network_and_device_time() -> None:
    costs = CopyCosts(FetchForm.STORE_AND_FORWARD)
    assert costs.fetch_s(RANK_128) + costs.local_s(RANK_128) == pytest.approx(50e-6 + RANK_128 / 24e9 + RANK_128 / 25e9)


def test_ranks_move_their_parts_at_once() -> None:
    assert CopyCosts(latency_s=0.0, ranks=4).provision_s(RANK_128) == pytest.approx(RANK_128 / 4 / 2e9)


def test_each_source_sends_one_copy_at_a_time() -> None:
    times = CopyTimes(CopyCosts(FetchForm.STORE_AND_FORWARD, network_bytes_per_s=100.0, latency_s=0.0))
    assert [times.fetched_s(A, 100, now) for now in (1.0, 1.5)] == [2.0, 3.0]
    assert times.fetched_s(B, 100, 1.5) == 2.5
    assert times.fetched_s(A, 100, 9.0) == 10.0


def test_a_pipelined_fetch_occupies_its_link_longer_than_its_request_waits() -> None:
    times = CopyTimes(CopyCosts(host_bytes_per_s=100.0, network_bytes_per_s=50.0, latency_s=0.0))
    assert times.fetched_s(A, 100, 0.0) == 1.0
    assert times.fetched_s(A, 100, 0.0) == 3.0


def test_each_replica_reads_from_its_own_drive() -> None:
    times = CopyTimes(CopyCosts(drive_bytes_per_s=100.0, latency_s=0.0))
    assert [times.provided_s(replica, 100, 0.0) for replica in (A, A, B)] == [1.0, 2.0, 1.0]
