"""What every block holds, as the scripted executor remembers it, and the rules that transfers keep to."""

from collections import Counter

from lorikeet.core.ids import AdapterDigest, BlockId
from lorikeet.core.plan import Tier, Transfer
from lorikeet.engine.executor import ExecutorError

Place = tuple[Tier, BlockId]
"""A block of one of the arenas."""


def require(condition: bool, complaint: str) -> None:
    """Refuse a plan that breaks a rule.

    Raises:
        ExecutorError: the condition does not hold.
    """
    if not condition:
        raise ExecutorError(complaint)


class ScriptedArenas:
    """The device's and the host's blocks.

    A block holds KV by offset, ``("weights", digest, index)``, or what nobody may read: ``("in flight", transfer)``,
    from when a transfer begins until it arrives, and for ever if it fails. Contents go where transfers carry them.

    Attributes:
        transfers: those under way, by id.
    """

    def __init__(self) -> None:
        self.transfers: dict[int, Transfer] = {}
        self._contents: dict[Place, object] = {}
        self._writes: set[Place] = set()
        self._reads: Counter[Place] = Counter()
        self._last_id = -1

    def holds(self, block: BlockId, tier: Tier = Tier.DEVICE) -> object:
        """Return what a block holds."""
        return self._contents.get((tier, block))

    def kv(self, block: BlockId, offset: int) -> int | None:
        """Return the KV of a token in a device block, None if there is none."""
        held = self.holds(block)
        return held.get(offset) if isinstance(held, dict) else None

    def write_kv(self, block: BlockId, offset: int, key: int) -> None:
        """Write the KV of a token into a device block.

        Raises:
            ExecutorError: a transfer reads or writes the block.
        """
        place = (Tier.DEVICE, block)
        require(not self._is_busy(place), f"KV is written into block {block}, which is part of a transfer")
        held = self._contents.get(place)
        if offset == 0 or not isinstance(held, dict):
            held = self._contents[place] = {}
        held[offset] = key

    def read_host(self, block: BlockId) -> dict[int, int]:
        """Return the KV that a host block holds, by offset.

        Raises:
            ExecutorError: it holds none, or a transfer writes it.
        """
        place = (Tier.HOST, block)
        held = self._contents.get(place)
        require(isinstance(held, dict) and place not in self._writes, f"host block {block} is read and holds no KV")
        assert isinstance(held, dict)
        return held

    def write_host(self, block: BlockId, kv: dict[int, int]) -> None:
        """Write KV that comes from elsewhere into a host block.

        Raises:
            ExecutorError: a transfer reads or writes the block.
        """
        place = (Tier.HOST, block)
        require(not self._is_busy(place), f"host block {block} is written, which is part of a transfer")
        self._contents[place] = kv

    def awaits(self, digest: AdapterDigest) -> bool:
        """Whether an adapter is on its way to the device."""
        coming = (transfer for transfer in self.transfers.values() if transfer.target is Tier.DEVICE)
        return any(transfer.adapter is not None and transfer.adapter.digest == digest for transfer in coming)

    def begin(self, transfer: Transfer) -> None:
        """Check a transfer. Nobody may read what it writes until it has ended.

        Raises:
            ExecutorError: its number or its blocks are not as they must be, or another transfer needs these.
        """
        name, written, read = f"transfer {transfer.transfer_id}", _written(transfer), _read(transfer)
        require(transfer.transfer_id > self._last_id, f"{name} comes after transfer {self._last_id}")
        require(_is_route(transfer), f"the blocks of {name} do not fit its route: {transfer}")
        require(len({*written, *read}) == len(written) + len(read), f"{name} names a block twice: {transfer}")
        for place in written:
            require(not self._is_busy(place), f"{name} writes {place}, which is part of another")
        for place in read:
            require(place not in self._writes, f"{name} reads {place}, which another still writes")
        self._last_id = transfer.transfer_id
        self.transfers[transfer.transfer_id] = transfer
        self._writes.update(written)
        self._reads.update(read)
        self._contents |= dict.fromkeys(written, ("in flight", transfer.transfer_id))

    def end(self, transfer: Transfer, *, fails: bool) -> None:
        """Let its bytes arrive, unless it fails."""
        del self.transfers[transfer.transfer_id]
        written, read = _written(transfer), _read(transfer)
        self._writes.difference_update(written)
        self._reads.subtract(read)
        if fails:
            return
        if transfer.source is Tier.SOURCE:
            assert transfer.adapter is not None
            for places in (_host_places(transfer), _device_places(transfer)):
                for index, place in enumerate(places):
                    self._contents[place] = ("weights", transfer.adapter.digest, index)
        else:
            for place, origin in zip(written, read, strict=True):
                held = self._contents.get(origin)
                self._contents[place] = dict(held) if isinstance(held, dict) else held

    def _is_busy(self, place: Place) -> bool:
        return place in self._writes or self._reads[place] > 0


def _host_places(transfer: Transfer) -> tuple[Place, ...]:
    return tuple((Tier.HOST, block) for block in transfer.host_blocks)


def _device_places(transfer: Transfer) -> tuple[Place, ...]:
    return tuple((Tier.DEVICE, block) for block in transfer.device_blocks)


def _written(transfer: Transfer) -> tuple[Place, ...]:
    """Return the blocks whose contents a transfer replaces."""
    if transfer.source is Tier.SOURCE:
        return _host_places(transfer) + _device_places(transfer)
    return _device_places(transfer) if transfer.target is Tier.DEVICE else _host_places(transfer)


def _read(transfer: Transfer) -> tuple[Place, ...]:
    """Return the blocks that a transfer reads, in the order of those that it writes."""
    if transfer.source is Tier.SOURCE:
        return ()
    return _host_places(transfer) if transfer.source is Tier.HOST else _device_places(transfer)


def _is_route(transfer: Transfer) -> bool:
    """Whether such transfers exist, with blocks on both sides where they have to be."""
    host, device, is_adapter = len(transfer.host_blocks), len(transfer.device_blocks), transfer.adapter is not None
    match transfer.source, transfer.target:
        case Tier.SOURCE, Tier.HOST:
            return is_adapter and host > 0 and device == 0
        case Tier.SOURCE, Tier.DEVICE:
            return is_adapter and device > 0 and host in (0, device)
        case Tier.HOST, Tier.DEVICE:
            return host == device > 0
        case Tier.DEVICE, Tier.HOST:
            return host == device > 0 and not is_adapter
    return False
