"""Transfers of one rank: real files, a real loader process, real copies."""

import gc
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import torch
from torch import Tensor

from lorikeet.adapters.store import reference
from lorikeet.adapters.weights import load_weights
from lorikeet.config import EngineSettings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.executor import ExecutorError
from lorikeet.core.geometry import LORA_MODULES
from lorikeet.core.ids import AdapterDigest, BlockId
from lorikeet.core.plan import Tier, Transfer, TransferDone
from lorikeet.core.process_tuning import NICE
from lorikeet.memory.adapter_blocks import AdapterLayout
from lorikeet.memory.packing import pack, write_pieces
from lorikeet.worker import helper_process
from lorikeet.worker.helper_process import HelperProcess
from lorikeet.worker.transfer import state, transfers
from lorikeet.worker.transfer.device import Cpu, DeviceBackend
from lorikeet.worker.transfer.finished import FinishedTransfers, TransferWork
from lorikeet.worker.transfer.loader import Loader, _Reading, start_loader_process
from lorikeet.worker.transfer.loader_process import BlocksFilled, ReadEnded
from lorikeet.worker.transfer.state import STAGED_BLOCKS, TransferState
from lorikeet.worker.transfer.transfers import TransferManager
from lorikeet.workloads.random_adapters import write_random_adapter
from tests.adapters.builders import geometry
from tests.support.gates import Gate
from tests.support.late_device import LateDevice
from tests.support.waiting import wait_until

ELEMENTS = 128
DEVICE_BLOCKS = 1200
HOST_BLOCKS = 600
GROUP_BLOCKS = 3
BLOCK_BYTES = ELEMENTS * 4
SLOW_BYTES_PER_S = BLOCK_BYTES / 0.02
"""20 ms a block."""


@pytest.fixture(scope="module", autouse=True)
def _small_groups() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfers, "GROUP_BYTES", GROUP_BLOCKS * BLOCK_BYTES)
        yield


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, AdapterRef]:
    """One of each size."""
    made = {}
    for seed, (name, rank, modules) in enumerate([("small", 4, ("q", "v")), ("large", 16, LORA_MODULES)]):
        folder = write_random_adapter(
            tmp_path_factory.mktemp("adapters") / name, geometry(), rank, modules=modules, seed=seed
        )
        made[name] = reference(name, folder, geometry())
    return made


class Bench:
    """A rank's arenas, scattered blocks of them, and all transfers that have ended."""

    def __init__(
        self, host_blocks: int, rank: int, size: int, settings: EngineSettings, device: DeviceBackend | None = None
    ) -> None:
        self.geometry = geometry(size)
        self.arena = torch.zeros(DEVICE_BLOCKS, ELEMENTS)
        self._changed = threading.Condition()
        self._ids = itertools.count()
        process = start_loader_process()
        self.transfers = TransferManager(
            self.arena, host_blocks, self.geometry, rank, size, process, settings, self._note, device
        )
        self.host = self.transfers.host
        self.clear()

    def clear(self) -> None:
        """Be as new, while nothing is under way."""
        order = torch.Generator().manual_seed(3)
        self._device = torch.randperm(len(self.arena), generator=order).tolist()
        self._host = torch.randperm(len(self.host), generator=order).tolist()
        self.arena.zero_()
        self.host.zero_()
        self.ended: dict[int, TransferDone] = {}
        self.when_ended: Callable[[int], None] = lambda transfer_id: None
        self.transfers.counts.take()

    def device_blocks(self, count: int) -> tuple[BlockId, ...]:
        """Take device blocks that nobody has."""
        return tuple(BlockId(self._device.pop()) for _ in range(count))

    def host_blocks(self, count: int) -> tuple[BlockId, ...]:
        """Take host blocks that nobody has."""
        return tuple(BlockId(self._host.pop()) for _ in range(count))

    def blocks_of(self, ref: AdapterRef) -> int:
        return pack(ref.ranks, self.geometry, ELEMENTS).blocks

    def start(
        self,
        source: Tier,
        target: Tier,
        host: tuple[BlockId, ...] = (),
        device: tuple[BlockId, ...] = (),
        adapter: AdapterRef | None = None,
        demand: bool = True,
        kept: int = 0,
    ) -> int:
        transfer_id = next(self._ids)
        self.transfers.start(Transfer(transfer_id, source, target, host, device, adapter, demand, kept=kept))
        return transfer_id

    def start_load(self, ref: AdapterRef, demand: bool = True) -> int:
        """From the source to the device at once."""
        device = self.device_blocks(self.blocks_of(ref))
        return self.start(Tier.SOURCE, Tier.DEVICE, device=device, adapter=ref, demand=demand)

    def start_read(self, ref: AdapterRef, demand: bool = True) -> int:
        """From the source to the host."""
        host = self.host_blocks(self.blocks_of(ref))
        return self.start(Tier.SOURCE, Tier.HOST, host=host, adapter=ref, demand=demand)

    def start_copy(self, target: Tier, blocks: int, demand: bool = True) -> int:
        """KV from the other tier."""
        source = Tier.HOST if target is Tier.DEVICE else Tier.DEVICE
        return self.start(source, target, self.host_blocks(blocks), self.device_blocks(blocks), demand=demand)

    def copied(self, transfer_id: int) -> int:
        """How many blocks of a transfer under way are where they should be; none of one that has ended."""
        with self.transfers._lock:
            state = self.transfers._inflight.get(transfer_id)
            return 0 if state is None else state.copied

    def wait(self, transfer_id: int) -> TransferDone:
        with self._changed:
            assert self._changed.wait_for(lambda: transfer_id in self.ended, 60.0), "it never ended"
        return self.ended[transfer_id]

    def signal_loader(self, number: signal.Signals) -> None:
        process_id = self.transfers.loader.process_id
        assert process_id is not None
        os.kill(process_id, number)

    def _note(self, done: TransferDone) -> None:
        self.when_ended(done.transfer_id)
        with self._changed:
            assert done.transfer_id not in self.ended
            self.ended[done.transfer_id] = done
            self._changed.notify_all()


@contextmanager
def moving(
    host_blocks: int = HOST_BLOCKS, rank: int = 0, size: int = 1, device: DeviceBackend | None = None, **settings: float
) -> Iterator[Bench]:
    bench = Bench(host_blocks, rank, size, msgspec.convert(settings, EngineSettings), device)
    try:
        yield bench
    finally:
        bench.transfers.close()


@pytest.fixture(scope="module", params=[Cpu, LateDevice])
def unpaced(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """Without a declared link; also on a device whose copies are done late, for the same to come true."""
    device: DeviceBackend = request.param()
    with moving(device=device) as made:
        yield made
    if isinstance(device, LateDevice):
        assert device.copies
        assert device.faults == []


@pytest.fixture
def bench(unpaced: Bench, adapters: dict[str, AdapterRef]) -> Bench:
    """One for many tests: a loader takes a while to start."""
    unpaced.clear()
    for ref in adapters.values():
        unpaced.transfers.adapters.evict(ref.digest)
    return unpaced


def packed(ref: AdapterRef, rank: int = 0, size: int = 1) -> Tensor:
    """The blocks of an adapter, written here."""
    packing = pack(ref.ranks, geometry(size), ELEMENTS)
    blocks = np.zeros((packing.blocks, ELEMENTS), np.float32)
    weights = load_weights(ref, geometry(size), "float32", rank, size)
    assert list(write_pieces(weights, packing, range(packing.blocks), blocks))
    return torch.from_numpy(blocks)


def assert_holds(bench: Bench, ref: AdapterRef, rank: int = 0, size: int = 1) -> None:
    """Steps would find the adapter's weights, all of them."""
    packing = pack(ref.ranks, geometry(size), ELEMENTS)
    blocks = packed(ref, rank, size)
    expected = AdapterLayout(packing, geometry(size)).weights(range(packing.blocks), blocks).pieces
    found = bench.transfers.adapters.weights(ref.digest).pieces
    assert found.keys() == expected.keys()
    for module, pieces in expected.items():
        for (a, bt), (found_a, found_bt) in zip(pieces, found[module], strict=True):
            assert torch.equal(found_a, a)
            assert torch.equal(found_bt, bt)


# --- routes ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_adapter_reaches_the_device_by_every_route(bench: Bench, adapters: dict[str, AdapterRef]) -> None:
    for ref in adapters.values():
        count = bench.blocks_of(ref)
        assert bench.wait(bench.start_load(ref)).error is None
        assert_holds(bench, ref)
        host = bench.host_blocks(count)
        by_host = bench.start(Tier.SOURCE, Tier.DEVICE, host, bench.device_blocks(count), ref)
        assert bench.wait(by_host).error is None
        assert_holds(bench, ref)
        assert torch.equal(bench.host[list(host)], packed(ref))
        bench.arena[:] = 7.0
        from_host = bench.start(Tier.HOST, Tier.DEVICE, host, bench.device_blocks(count), ref)
        assert bench.wait(from_host).error is None
        assert_holds(bench, ref)
        bench.arena[:] = 0.0


def test_blocks_still_on_the_device_are_not_copied(bench: Bench, adapters: dict[str, AdapterRef]) -> None:
    ref = adapters["large"]
    host, device = (blocks(bench.blocks_of(ref)) for blocks in (bench.host_blocks, bench.device_blocks))
    assert bench.wait(bench.start(Tier.SOURCE, Tier.DEVICE, host, device, ref)).error is None
    bench.transfers.evict(ref.digest)
    bench.arena[list(device[4:])] = 7.0
    bench.host[list(host[:4])] = 7.0
    assert bench.wait(bench.start(Tier.HOST, Tier.DEVICE, host, device, ref, kept=4)).error is None
    assert_holds(bench, ref)


def test_an_adapter_is_read_to_the_host_and_steps_do_not_see_it(bench: Bench, adapters: dict[str, AdapterRef]) -> None:
    ref = adapters["large"]
    host = bench.host_blocks(bench.blocks_of(ref))
    assert bench.wait(bench.start(Tier.SOURCE, Tier.HOST, host, adapter=ref)).error is None
    assert torch.equal(bench.host[list(host)], packed(ref))
    assert not bench.arena.any()
    with pytest.raises(ExecutorError, match="is not loaded"):
        bench.transfers.adapters.weights(ref.digest)


def test_kv_comes_back_from_the_host_as_it_went(bench: Bench) -> None:
    bench.arena.copy_(torch.randn(bench.arena.shape, generator=torch.Generator().manual_seed(1)))
    before = bench.arena.clone()
    was = bench.device_blocks(50)
    host = bench.host_blocks(50)
    now = bench.device_blocks(50)
    assert bench.wait(bench.start(Tier.DEVICE, Tier.HOST, host, was)).error is None
    assert torch.equal(bench.host[list(host)], before[list(was)])
    assert torch.equal(bench.arena, before)
    bench.arena[list(was)] = 0.0
    assert bench.wait(bench.start(Tier.HOST, Tier.DEVICE, host, now)).error is None
    assert torch.equal(bench.arena[list(now)], before[list(was)])
    rest = bench.device_blocks(DEVICE_BLOCKS - 100)
    assert torch.equal(bench.arena[list(rest)], before[list(rest)])
    assert int(bench.host.any(dim=1).sum()) == 50


@pytest.mark.slow
def test_each_rank_reads_its_own_share(adapters: dict[str, AdapterRef]) -> None:
    with moving(rank=1, size=2) as bench:
        assert bench.wait(bench.start_load(adapters["large"])).error is None
        assert_holds(bench, adapters["large"], 1, 2)


@pytest.mark.slow
def test_without_a_host_tier_adapters_are_loaded_and_nothing_else_is_moved(adapters: dict[str, AdapterRef]) -> None:
    with moving(host_blocks=0) as bench:
        assert bench.host.shape == (0, ELEMENTS)
        assert bench.wait(bench.start_load(adapters["large"])).error is None
        assert_holds(bench, adapters["large"])
        done = bench.wait(bench.start(Tier.DEVICE, Tier.HOST, (BlockId(0),), bench.device_blocks(1)))
        assert done.error == "there is no host block 0: the arena has 0 blocks"


@pytest.mark.slow
@pytest.mark.parametrize("through_host", [False, True])
def test_reads_that_wait_for_their_copy_count_no_time(
    adapters: dict[str, AdapterRef], monkeypatch: pytest.MonkeyPatch, through_host: bool
) -> None:
    """Its reader has ended where the adapter stays on the host, or waits for room where it passes through."""
    clock = SimpleNamespace(now=0.0)
    is_read = threading.Event()
    filled = TransferManager._filled
    read_ended = TransferManager._read_ended

    def told_filled(self: TransferManager, message: BlocksFilled) -> None:
        filled(self, message)
        if message.blocks == STAGED_BLOCKS and not through_host:
            is_read.set()

    def told_ended(self: TransferManager, message: ReadEnded) -> None:
        read_ended(self, message)
        is_read.set()

    monkeypatch.setattr(TransferManager, "_filled", told_filled)
    monkeypatch.setattr(TransferManager, "_read_ended", told_ended)
    monkeypatch.setattr(state, "time", SimpleNamespace(monotonic=lambda: clock.now))
    ref = adapters["large"]
    with moving() as bench:
        gate = Gate(bench.transfers)
        count = bench.blocks_of(ref)
        assert count > STAGED_BLOCKS
        host = bench.host_blocks(count) if through_host else ()
        load = bench.start(Tier.SOURCE, Tier.DEVICE, host, bench.device_blocks(count), ref)
        assert is_read.wait(60.0)
        clock.now = 100.0
        gate.open(10 * count)
        done = bench.wait(load)
    assert (done.error, done.duration_s) == (None, 0.0)


@pytest.mark.slow
def test_a_declared_link_is_never_faster_than_it_is_and_loses_nothing(adapters: dict[str, AdapterRef]) -> None:
    rate = BLOCK_BYTES * 2000.0
    ref = adapters["large"]
    with moving(link_bytes_per_s=rate) as bench:
        blocks = bench.blocks_of(ref)
        for start in (lambda: bench.start_load(ref), lambda: bench.start_copy(Tier.HOST, blocks)):
            started_s = time.monotonic()
            done = bench.wait(start())
            took_s = time.monotonic() - started_s
            assert took_s >= blocks * BLOCK_BYTES / rate
            assert 0.0 < done.duration_s <= took_s
        assert_holds(bench, ref)


# --- order -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [Tier.DEVICE, Tier.HOST])
def test_a_copy_that_is_awaited_waits_for_one_group_of_a_prefetch_at_most(target: Tier) -> None:
    with moving(link_bytes_per_s=SLOW_BYTES_PER_S) as bench:
        prefetch = bench.start_copy(target, 100, demand=False)
        seen: list[int] = []
        bench.when_ended = lambda _: seen.append(bench.copied(prefetch))
        demand = bench.start_copy(target, 3)
        before = bench.copied(prefetch)
        assert bench.wait(demand).error is None
        assert seen[0] <= before + GROUP_BLOCKS


def test_a_prefetch_that_is_awaited_by_now_overtakes_the_others() -> None:
    with moving(link_bytes_per_s=SLOW_BYTES_PER_S) as bench:
        first = bench.start_copy(Tier.DEVICE, 100, demand=False)
        seen: list[int] = []
        bench.when_ended = lambda _: seen.append(bench.copied(first))
        second = bench.start_copy(Tier.DEVICE, 3, demand=False)
        bench.transfers.promote((second, 999))
        before = bench.copied(first)
        bench.wait(second)
        assert seen[0] <= before + GROUP_BLOCKS


def test_equally_urgent_copies_end_in_the_order_in_which_they_began() -> None:
    with moving(link_bytes_per_s=SLOW_BYTES_PER_S / 0.1) as bench:
        prefetches = [bench.start_copy(Tier.DEVICE, 3, demand=False) for _ in range(4)]
        demands = [bench.start_copy(Tier.DEVICE, 2) for _ in range(4)]
        for transfer_id in prefetches:
            bench.wait(transfer_id)
        ended = list(bench.ended)
        assert [transfer_id for transfer_id in ended if transfer_id in prefetches] == prefetches
        assert [transfer_id for transfer_id in ended if transfer_id in demands] == demands


def test_starting_a_copy_looks_at_no_other_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be many, and readers have nothing to do with it."""
    urgency = TransferState.urgency.fget
    asked = []
    assert urgency is not None
    monkeypatch.setattr(
        TransferState, "urgency", property(lambda self: (asked.append(threading.current_thread()), urgency(self))[1])
    )

    class Watched(dict[int, TransferState]):
        def values(self) -> Any:
            asked.append(threading.current_thread())
            return super().values()

    with moving() as bench:
        bench.transfers._inflight = Watched()
        for transfer_id in [bench.start_copy(target, 2) for target in (Tier.DEVICE, Tier.HOST) for _ in range(5)]:
            bench.wait(transfer_id)
    assert asked
    assert threading.current_thread() not in asked


def test_the_two_directions_do_not_wait_for_each_other() -> None:
    with moving(link_bytes_per_s=SLOW_BYTES_PER_S) as bench:
        into = bench.start_copy(Tier.DEVICE, 100)
        out = bench.start_copy(Tier.HOST, 2)
        bench.wait(out)
        assert into not in bench.ended


@pytest.mark.slow
def test_a_demanded_load_overtakes_prefetches(bench: Bench, adapters: dict[str, AdapterRef]) -> None:
    bench.signal_loader(signal.SIGSTOP)
    prefetches = [bench.start_load(adapters["large"], demand=False) for _ in range(2)]
    demand = bench.start_load(adapters["small"])
    promoted = bench.start_read(adapters["small"], demand=False)
    bench.transfers.promote([promoted])
    bench.signal_loader(signal.SIGCONT)
    bench.wait(prefetches[1])
    ended = list(bench.ended)
    assert ended.index(prefetches[1]) > max(ended.index(demand), ended.index(promoted))


# --- what goes wrong ---------------------------------------------------------------------------------


def test_a_read_that_fails_is_reported_and_harms_no_other(
    bench: Bench, adapters: dict[str, AdapterRef], tmp_path: Path
) -> None:
    ref = adapters["small"]
    missing = msgspec.structs.replace(ref, folder=str(tmp_path / "none"), digest=AdapterDigest("missing"))
    weights = write_random_adapter(tmp_path / "broken", geometry(), 4, modules=("q", "v")) / "adapter_model.safetensors"
    weights.write_bytes(b"\xff" * weights.stat().st_size)
    broken = msgspec.structs.replace(ref, folder=str(weights.parent), digest=AdapterDigest("broken"))
    other_rank = write_random_adapter(tmp_path / "other", geometry(), 2, modules=("q", "v"))
    changed = msgspec.structs.replace(
        ref,
        folder=str(other_rank),
        digest=AdapterDigest("changed"),
        weight_bytes=(other_rank / "adapter_model.safetensors").stat().st_size,
    )
    fine = bench.start_load(adapters["large"])
    failing = {str(one.digest): bench.start_load(one) for one in (missing, broken, changed)}
    errors = {digest: bench.wait(transfer_id).error or "" for digest, transfer_id in failing.items()}
    assert str(tmp_path / "none") in errors["missing"]
    assert "adapter_model.safetensors" in errors["broken"]
    assert "rank 2, which is not what was packed" in errors["changed"]
    assert bench.wait(fine).error is None
    assert_holds(bench, adapters["large"])
    for digest in failing:
        with pytest.raises(ExecutorError, match=f"adapter {digest} is used, but is not loaded"):
            bench.transfers.adapters.weights(AdapterDigest(digest))
    assert bench.wait(bench.start_read(missing)).error == errors["missing"]
    # Readers that have failed read on.
    assert bench.wait(bench.start_load(ref)).error is None


def test_transfers_that_make_no_sense_fail(bench: Bench, adapters: dict[str, AdapterRef]) -> None:
    ref = adapters["small"]
    count = bench.blocks_of(adapters["small"])
    device = bench.device_blocks(count)
    host = bench.host_blocks(count)
    outside = (BlockId(DEVICE_BLOCKS), *device[1:])
    cases = {
        f"no device block {DEVICE_BLOCKS}": bench.start(Tier.HOST, Tier.DEVICE, host, outside),
        "no host block -1": bench.start(Tier.DEVICE, Tier.HOST, (BlockId(-1), *host[1:]), device),
        "do not go together": bench.start(Tier.HOST, Tier.DEVICE, host[1:], device),
        "only adapters have a source": bench.start(Tier.SOURCE, Tier.DEVICE, (), device),
        f"takes {count} blocks, not {count - 1}": bench.start(Tier.SOURCE, Tier.HOST, host[1:], (), ref),
        f"{count} of {count} blocks cannot be kept": bench.start(Tier.HOST, Tier.DEVICE, host, device, ref, kept=count),
        f"the adapter takes {count} blocks": bench.start(Tier.HOST, Tier.DEVICE, host[1:], device[1:], ref),
    }
    for message, transfer_id in cases.items():
        assert message in (bench.wait(transfer_id).error or "")


@pytest.mark.slow
def test_reads_of_a_killed_loader_are_repeated_by_the_next(
    bench: Bench, adapters: dict[str, AdapterRef], caplog: pytest.LogCaptureFixture
) -> None:
    bench.signal_loader(signal.SIGSTOP)
    read = [bench.start_read(adapters["small"], demand=False), bench.start_load(adapters["large"])]
    waiting = bench.start_read(adapters["large"])
    copied = bench.start_copy(Tier.HOST, 3)
    assert bench.wait(copied).error is None
    before = bench.transfers.loader.process_id
    bench.signal_loader(signal.SIGKILL)
    for transfer_id in (*read, waiting):
        assert bench.wait(transfer_id).error is None
    assert_holds(bench, adapters["large"])
    assert bench.transfers.loader.process_id not in (None, before)
    assert "adapter large is read again, since the loader process was killed by SIGKILL" in caplog.text
    assert bench.wait(bench.start_load(adapters["large"])).error is None


@pytest.mark.slow
def test_an_adapter_whose_loader_dies_in_the_middle_is_loaded_from_its_start(adapters: dict[str, AdapterRef]) -> None:
    with moving(link_bytes_per_s=3 * SLOW_BYTES_PER_S) as bench:
        load = bench.start_load(adapters["large"])
        wait_until(lambda: bench.copied(load) > 1, "some of it is on the device")
        bench.signal_loader(signal.SIGKILL)
        assert bench.wait(load).error is None
        assert_holds(bench, adapters["large"])
        others = [bench.start_load(adapters["small"]) for _ in range(3)]
        assert all(bench.wait(other).error is None for other in others), "all readers are free"


@pytest.mark.slow
def test_a_read_that_is_lost_with_two_loaders_fails(adapters: dict[str, AdapterRef]) -> None:
    with moving(link_bytes_per_s=SLOW_BYTES_PER_S) as bench:
        load = bench.start_load(adapters["large"])
        for _ in range(2):
            before = bench.transfers.loader.process_id
            wait_until(lambda: bench.copied(load), "some of it is on the device")
            bench.signal_loader(signal.SIGKILL)
            wait_until(
                lambda old=before: bench.transfers.loader.process_id not in (None, old), "another loader is there"
            )
            wait_until(lambda: not bench.copied(load), "what was copied does not count")
        assert bench.wait(load).error == "the loader process was killed by SIGKILL"
        assert bench.wait(bench.start_load(adapters["small"])).error is None


def test_loader_runs_at_the_lowest_priority(bench: Bench) -> None:
    bench.transfers.loader.wait_until_ready()
    lowered = min(19, psutil.Process().nice() + NICE)
    assert psutil.Process(bench.transfers.loader.process_id).nice() == lowered


@pytest.mark.slow
def test_a_stuck_loader_is_killed_and_replaced(
    bench: Bench, adapters: dict[str, AdapterRef], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that reads from a file system that is gone."""
    with monkeypatch.context() as impatient:
        impatient.setattr(helper_process, "REPLY_TIMEOUT_S", 2.0)
        assert bench.wait(bench.start_read(adapters["small"])).error is None
        bench.signal_loader(signal.SIGSTOP)
        stuck = bench.start_read(adapters["small"])
        waiting = bench.start_load(adapters["large"])
        began_s = time.monotonic()
        assert bench.wait(stuck).error is None
        assert time.monotonic() - began_s < 30.0
    assert "the loader process has not replied for 2 s" in caplog.text
    assert bench.wait(waiting).error is None
    assert_holds(bench, adapters["large"])


@pytest.mark.slow
def test_an_idle_loader_that_is_stopped_is_replaced_before_it_is_needed(
    adapters: dict[str, AdapterRef], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Loader, "silence_timeout_s", 3.0)
    with moving() as bench:
        bench.transfers.loader.wait_until_ready()
        before = bench.transfers.loader.process_id
        bench.signal_loader(signal.SIGSTOP)
        wait_until(lambda: bench.transfers.loader.process_id not in (None, before), "another loader is there")
        assert "the loader process has sent no heartbeat for 3 s" in caplog.text
        assert bench.wait(bench.start_load(adapters["small"])).error is None


@pytest.mark.parametrize(
    ("filled", "since_s", "owes"),
    [(3, 1.0, True), (3, 2.0, True), (3, 2.5, False), (4, 1.0, False)],
)
def test_loader_without_room_or_with_a_recent_message_owes_nothing(
    bench: Bench, filled: int, since_s: float, owes: bool
) -> None:
    loader = bench.transfers.loader
    process = loader._running
    assert process is not None
    loader._reading[7] = _Reading(process, 0, 4, filled, since_s)
    assert loader._is_reply_overdue(process, 2.0) is owes
    del loader._reading[7]


@pytest.mark.slow
@pytest.mark.parametrize("rest_s", [3600.0, 0.0])
def test_loaders_that_end_again_and_again_are_given_a_rest(
    adapters: dict[str, AdapterRef], monkeypatch: pytest.MonkeyPatch, rest_s: float
) -> None:
    monkeypatch.setattr(helper_process, "MAX_FAILED_STARTS", 2)
    monkeypatch.setattr(helper_process, "RESTART_DELAY_S", rest_s)
    monkeypatch.setattr(transfers, "MAX_READS", 1)
    with moving() as bench:
        for _ in range(2):
            bench.transfers.loader.wait_until_ready()
            bench.signal_loader(signal.SIGSTOP)
            failing = bench.start_load(adapters["small"])
            bench.signal_loader(signal.SIGKILL)
            assert "SIGKILL" in (bench.wait(failing).error or "")
        next_one = bench.start_load(adapters["small"])
        if rest_s:
            with pytest.raises(ExecutorError, match="2 times in a row"):
                bench.transfers.loader.wait_until_ready()
            assert next_one not in bench.ended
        else:
            assert bench.wait(next_one).error is None


@pytest.mark.slow
def test_reads_wait_for_the_end_of_the_rest(
    adapters: dict[str, AdapterRef], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(helper_process, "MAX_FAILED_STARTS", 1)
    monkeypatch.setattr(helper_process, "RESTART_DELAY_S", 0.5)
    with moving() as bench:
        bench.transfers.loader.wait_until_ready()
        bench.signal_loader(signal.SIGSTOP)
        waiting = [bench.start_load(adapters["large"])]
        bench.signal_loader(signal.SIGKILL)
        wait_until(lambda: bench.transfers.loader.process_id is None, "it has ended")
        waiting += [bench.start_load(adapters["small"]), bench.start_read(adapters["large"])]
        assert [bench.wait(each).error for each in waiting] == [None] * 3
        start = helper_process.start_helper_process

        def fail(module: str, name: str) -> HelperProcess:
            raise ExecutorError("no memory")

        monkeypatch.setattr(helper_process, "start_helper_process", fail)
        bench.signal_loader(signal.SIGKILL)
        wait_until(lambda: bench.transfers.loader.process_id is None, "it has ended")
        waiting = [bench.start_load(adapters["small"]), bench.start_read(adapters["large"])]
        assert [bench.wait(each).error for each in waiting] == ["no memory"] * 2, "none waits for ever"
        monkeypatch.setattr(helper_process, "start_helper_process", start)
        assert bench.wait(bench.start_load(adapters["large"])).error is None


def test_closing_ends_the_loader_in_the_middle_of_everything(adapters: dict[str, AdapterRef]) -> None:
    with moving(link_bytes_per_s=SLOW_BYTES_PER_S) as bench:
        bench.start_load(adapters["large"])
        bench.start_copy(Tier.HOST, 100)
        process_id = bench.transfers.loader.process_id
        assert process_id is not None
    assert not psutil.pid_exists(process_id)


@pytest.mark.slow
def test_closing_frees_the_host_arena_despite_remaining_references(adapters: dict[str, AdapterRef]) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("lorikeet-host-arena")

    gc.collect()
    before = mapped()
    with moving() as bench:
        assert bench.wait(bench.start_read(adapters["small"])).error is None
        assert mapped() == before + 1
        del bench.host
    assert mapped() == before


# --- fences ------------------------------------------------------------------------------------------


def test_an_eviction_wins_over_a_load_that_ends_later(bench: Bench, adapters: dict[str, AdapterRef]) -> None:
    ref = adapters["small"]
    bench.signal_loader(signal.SIGSTOP)
    load = bench.start_load(ref)
    bench.transfers.adapters.evict(ref.digest)
    bench.signal_loader(signal.SIGCONT)
    assert bench.wait(load).error is None
    with pytest.raises(ExecutorError, match="is not loaded"):
        bench.transfers.adapters.weights(ref.digest)


@pytest.mark.slow
@pytest.mark.parametrize("older_is_awaited", [True, False])
def test_the_newer_of_two_loads_wins_whichever_ends_first(
    bench: Bench, adapters: dict[str, AdapterRef], older_is_awaited: bool
) -> None:
    ref = adapters["small"]
    count = bench.blocks_of(ref)
    bench.signal_loader(signal.SIGSTOP)
    in_the_way = bench.start_load(adapters["large"], demand=older_is_awaited)
    older = bench.start_load(ref, demand=older_is_awaited)
    newer_blocks = bench.device_blocks(count)
    newer = bench.start(Tier.SOURCE, Tier.DEVICE, (), newer_blocks, ref)
    bench.signal_loader(signal.SIGCONT)
    for transfer_id in (in_the_way, older, newer):
        assert bench.wait(transfer_id).error is None
    assert (list(bench.ended).index(older) < list(bench.ended).index(newer)) == older_is_awaited
    first_a = bench.transfers.adapters.weights(ref.digest).pieces[0, "q"][0][0]
    assert first_a.data_ptr() == bench.arena[newer_blocks[0]].data_ptr()


# --- who did it --------------------------------------------------------------------------------------


def test_no_work_is_done_on_the_thread_that_starts_transfers(bench: Bench, adapters: dict[str, AdapterRef]) -> None:
    ref = adapters["large"]
    count = bench.blocks_of(ref)
    for started in (bench.start_load(ref), bench.start_read(ref), bench.start_copy(Tier.HOST, 5)):
        assert bench.wait(started).error is None
    work = bench.transfers.counts.by_thread()
    own_threads = {thread.id for thread in psutil.Process().threads()}
    totals = {kind: sum(times for worker, times in work.items() if worker.work is kind) for kind in TransferWork}
    modules = len(LORA_MODULES) * geometry().layers
    assert totals == {TransferWork.READ: 2 * modules, TransferWork.PACK: 2 * count, TransferWork.COPY: count + 5}
    assert threading.get_native_id() not in {worker.thread for worker in work}
    for worker in work:
        assert (worker.thread in own_threads) == (worker.work is TransferWork.COPY)


# --- A transfer is done when every rank says so -------------------------------------------------


def test_transfer_ends_with_its_last_rank_and_lasts_as_its_slowest() -> None:
    woken: list[None] = []
    finished = FinishedTransfers(2, lambda: woken.append(None))
    finished.report(TransferDone(1, duration_s=3.0))
    finished.report(TransferDone(2))
    assert (finished.take(), woken) == ([], [])
    finished.report(TransferDone(1, duration_s=1.0))
    assert len(woken) == 1
    assert finished.take() == [TransferDone(1, duration_s=3.0)]
    assert finished.take() == []


def test_one_rank_that_fails_fails_it() -> None:
    for errors in (("disk", None), (None, "disk"), ("disk", "other")):
        finished = FinishedTransfers(2, lambda: None)
        for error in errors:
            finished.report(TransferDone(7, error))
        assert finished.take() == [TransferDone(7, "disk")]


def test_waiting_ends_with_a_transfer_or_when_nothing_more_will_come() -> None:
    finished = FinishedTransfers(1, lambda: None)
    threading.Thread(target=finished.report, args=(TransferDone(1),)).start()
    finished.wait(None)
    assert finished.take() == [TransferDone(1)]
    threading.Thread(target=finished.break_off).start()
    finished.wait(None)
    assert finished.take() == []
