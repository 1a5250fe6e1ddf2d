"""Layers of an adapter arrive one by one, in order."""

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lorikeet.adapters.store import reference
from lorikeet.config import EngineSettings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import BlockId
from lorikeet.core.plan import Tier, Transfer, TransferDone
from lorikeet.costs.prefill_pipeline import cut, load_order
from lorikeet.kernels.lora import LoraWeights
from lorikeet.memory.packing import AdapterPacking, block_runs, layer_blocks, pack
from lorikeet.worker.transfer import state as arrivals
from lorikeet.worker.transfer.copies import GROUP_BYTES
from lorikeet.worker.transfer.loader import start_loader_process
from lorikeet.worker.transfer.state import PartialAdapter
from lorikeet.worker.transfer.transfers import TransferManager
from lorikeet.workloads.random_adapters import write_random_adapter
from tests.adapters.builders import geometry
from tests.support.gates import Gate

LAYERS = 6
ELEMENTS = 512
GEOMETRY = geometry(layers=LAYERS)


class Bench:
    """A rank's arenas, with an adapter on the host, and a gate before copies to the device."""

    def __init__(self, folder: Path) -> None:
        path = write_random_adapter(folder, GEOMETRY, 12, modules=("q", "k", "v"))
        self.ref: AdapterRef = reference("a", path, GEOMETRY)
        self.packing: AdapterPacking = pack(self.ref.ranks, GEOMETRY, ELEMENTS)
        self.runs = block_runs(self.packing, load_order(cut(LAYERS, 2)))
        self.arena = torch.zeros(200, ELEMENTS)
        self.ended: list[TransferDone] = []
        self._changed = threading.Condition()
        self.transfers = TransferManager(
            self.arena, 100, GEOMETRY, 0, 1, start_loader_process(), EngineSettings(), self._note
        )
        self.host = tuple(BlockId(block) for block in range(99, 99 - self.packing.blocks, -1))
        self.transfers.start(Transfer(0, Tier.SOURCE, Tier.HOST, self.host, adapter=self.ref))
        self.wait(1)
        self.gate = Gate(self.transfers)
        self.ids = 0

    def start(self, groups: tuple[tuple[int, int], ...]) -> None:
        self.ids += 1
        first = 100 * (self.ids % 2)
        device = tuple(BlockId(first + block) for block in range(self.packing.blocks))
        transfer = Transfer(self.ids, Tier.HOST, Tier.DEVICE, self.host, device, self.ref, groups=groups)
        self.device = device
        self.transfers.start(transfer)

    def wait(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.ended) == count, 60.0)

    def _note(self, done: TransferDone) -> None:
        with self._changed:
            self.ended.append(done)
            self._changed.notify_all()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("adapters") / "a")
    yield bench
    bench.transfers.close()


@pytest.fixture
def bench(made: Bench) -> Bench:
    made.ended.clear()
    made.arena.zero_()
    made.transfers.adapters.evict(made.ref.digest)
    return made


def arrival_of(bench: Bench) -> PartialAdapter:
    found = bench.transfers.partial_adapter(bench.ref.digest)
    assert found is not None
    return found


def there(arrival: PartialAdapter) -> list[int]:
    return [layer for layer in range(LAYERS) if arrival.has(layer)]


def test_groups_arrive_in_their_order_and_layers_with_their_last_block(bench: Bench) -> None:
    bench.start(bench.runs)
    arrival = arrival_of(bench)
    assert there(arrival) == []
    blocks = layer_blocks(bench.packing, LAYERS)
    for expected, run in zip(([2, 3], [2, 3, 4, 5]), bench.runs, strict=False):
        bench.gate.open(1)
        assert arrival.wait_for(expected[-1])
        assert there(arrival) == expected
        for block in range(*run):
            assert torch.equal(bench.arena[bench.device[block]], bench.transfers.host[bench.host[block]])
        for layer in expected:
            for block in blocks[layer]:
                assert bench.arena[bench.device[block]].any()
    untouched = set(range(bench.packing.blocks)).difference(*(range(*run) for run in bench.runs[:2]))
    assert untouched
    assert not any(bench.arena[bench.device[block]].any() for block in untouched)
    assert arrival_of(bench) is arrival
    bench.gate.open(1)
    bench.wait(1)
    assert there(arrival) == list(range(LAYERS))
    assert arrival.arrived_s(2) < arrival.arrived_s(5) < arrival.arrived_s(0) == arrival.arrived_s(1)
    assert bench.transfers.partial_adapter(bench.ref.digest) is None
    assert bench.transfers.adapters.weights(bench.ref.digest).rank == 12


def test_layers_without_changes_are_ready_before_any_copy(bench: Bench) -> None:
    arrival = PartialAdapter(1, bench.ref, bench.host, LoraWeights({}, 4), (0, 2, 0, 1), range(0))
    assert [arrival.has(layer) for layer in range(4)] == [True, False, True, False]
    assert arrival.wait_for(0, 0.0)
    arrival.note(1, failed=False)
    assert [arrival.has(layer) for layer in range(4)] == [True, False, True, True]


def test_arrival_pace_counts_from_its_turn_not_from_its_queueing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(arrivals, "time", SimpleNamespace(monotonic=lambda: clock.now))
    bench.start(bench.runs)
    arrival = arrival_of(bench)
    clock.now = 50.0
    bench.gate.open(1)
    assert arrival.wait_for(3)
    assert arrival.due_s(0) == 50.0
    bench.gate.open(2)
    bench.wait(1)


def test_a_late_query_of_an_arrival_returns_all_arrived_layers(bench: Bench) -> None:
    bench.start(bench.runs)
    bench.gate.open(2)
    bench.gate.wait_until_shut()
    arrival = arrival_of(bench)
    assert there(arrival) == [2, 3, 4, 5]
    bench.gate.open(1)
    bench.wait(1)


def test_a_group_larger_than_is_copied_at_once_arrives_with_its_last_part(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.transfers, "_group_blocks", 2)
    bench.start(bench.runs)
    arrival = arrival_of(bench)
    first, stop = bench.runs[0]
    parts = -(-(stop - first) // 2)
    assert parts > 1
    bench.gate.open(parts - 1)
    bench.gate.wait_until_shut()
    assert 3 not in there(arrival)
    bench.gate.open(1)
    assert arrival.wait_for(3)
    assert there(arrival) == [2, 3]
    bench.gate.open(100)
    bench.wait(1)
    bench.gate.shut()


def test_a_transfer_without_groups_is_of_no_use_before_its_end(bench: Bench) -> None:
    bench.start(())
    assert bench.transfers.partial_adapter(bench.ref.digest) is None
    bench.gate.open(100)
    bench.wait(1)
    bench.gate.shut()
    assert bench.transfers.adapters.weights(bench.ref.digest).rank == 12


def test_a_newer_transfer_takes_the_place_of_an_arrival(bench: Bench) -> None:
    bench.start(bench.runs)
    older = arrival_of(bench)
    bench.start(bench.runs)
    newer = arrival_of(bench)
    assert newer is not older
    bench.gate.open(3)
    bench.wait(1)
    assert there(older) == list(range(LAYERS))
    assert there(newer) == []
    assert arrival_of(bench) is newer
    bench.gate.open(3)
    bench.wait(2)


def test_nothing_arrives_after_a_copy_has_failed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.start(bench.runs)
    arrival = arrival_of(bench)
    bench.gate.open(1)
    assert arrival.wait_for(3)
    bench.gate.failing = True
    bench.gate.open(1)
    assert not arrival.wait_for(5)
    assert there(arrival) == [2, 3]
    bench.wait(1)
    bench.gate.failing = False
    assert bench.ended[0].error is not None
    assert bench.transfers.partial_adapter(bench.ref.digest) is arrival, "a step that counts on it goes on by the host"
    bench.start(())
    assert bench.transfers.partial_adapter(bench.ref.digest) is None, "it is tried again"
    bench.gate.open(100)
    bench.wait(2)
    bench.gate.shut()


@pytest.mark.parametrize("groups", [((0, 1),), ((0, 2), (1, 99)), ((1, 0),)])
def test_groups_that_leave_blocks_out_are_refused(bench: Bench, groups: tuple[tuple[int, int], ...]) -> None:
    bench.start(groups)
    bench.wait(1)
    assert "do not name each of" in (bench.ended[0].error or "")
    assert bench.transfers.partial_adapter(bench.ref.digest) is None


def test_the_size_of_a_group_is_that_of_copies() -> None:
    assert GROUP_BYTES >= 100 * ELEMENTS * 4  # so that a group here is copied at once
