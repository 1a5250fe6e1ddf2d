"""Models the times of adapter copies, between replicas and from source files.

Source: LoRAServe, section IV-B, which moves adapters from GPU to GPU over InfiniBand. Figure 14 shows, without numbers,
that such a copy takes about as long as a load from a host to its GPU, and that reading from a drive is too slow. The
numbers in this module are ours.
"""

from enum import StrEnum

import msgspec

from lorikeet.core.ids import ReplicaId


class FetchForm(StrEnum):
    """Names the ways to send an adapter's bytes between machines."""

    PIPELINED = "pipelined"
    """The adapter is sent in pieces from device to device.

    While one piece crosses the network, the next piece leaves its host.
    """
    STORE_AND_FORWARD = "store-and-forward"
    """The whole adapter is sent to the host's memory. The engine then loads it to the device like any other adapter."""


class CopyCosts(msgspec.Struct, frozen=True):
    """Holds the bandwidths and latencies from which copy times are computed.

    A replica's copies lie in its host's memory, and are still loaded to the device when a request needs them. The
    engine takes that time (``local_s``) itself, so it is not part of the copy.

    Attributes:
        form: form in which adapters are sent between machines.
        host_bytes_per_s: bandwidth between a host and each rank's device. The default is PCI Express 4.0 with 16 lanes,
            which reaches about 25 of its 32 GB/s. The engines must use the same value.
        network_bytes_per_s: bandwidth between two machines. The default is InfiniBand HDR: 200 Gbit/s less protocol
            overhead.
        drive_bytes_per_s: speed of reading an adapter's source files. The default is a cloud machine's solid-state
            drive.
        latency_s: latency of each copy between machines, or from files.
        ranks: number of a replica's ranks, which load their parts in parallel.
    """

    form: FetchForm = FetchForm.PIPELINED
    host_bytes_per_s: float = 25e9
    network_bytes_per_s: float = 24e9
    drive_bytes_per_s: float = 2e9
    latency_s: float = 50e-6
    ranks: int = 1

    def local_s(self, size_bytes: int) -> float:
        """Return the time of the engine's load from the replica's host to its device."""
        return size_bytes / self.ranks / self.host_bytes_per_s

    def link_s(self, size_bytes: int) -> float:
        """Return the time for which a fetch occupies the link of its source."""
        if self.form is FetchForm.PIPELINED:
            return self._over(size_bytes, min(self.host_bytes_per_s, self.network_bytes_per_s))
        return self._over(size_bytes, self.network_bytes_per_s)

    def fetch_s(self, size_bytes: int) -> float:
        """Return the time from the start of a fetch until its request can be submitted."""
        link_s = self.link_s(size_bytes)
        return link_s - self.local_s(size_bytes) if self.form is FetchForm.PIPELINED else link_s

    def kv_transfer_s(self, size_bytes: int) -> float:
        """Return the time to send a request's KV from one host's memory to another's."""
        return self._over(size_bytes, self.network_bytes_per_s)

    @property
    def kv_bytes_per_s(self) -> float:
        """Bytes of KV per second from device to device, through both hosts."""
        return self.ranks / (2 / self.host_bytes_per_s + 1 / self.network_bytes_per_s)

    def provision_s(self, size_bytes: int) -> float:
        """Return the time to read an adapter from its source files into a host's memory."""
        return self._over(size_bytes, self.drive_bytes_per_s)

    def _over(self, size_bytes: int, bytes_per_s: float) -> float:
        return self.latency_s + size_bytes / self.ranks / bytes_per_s


class CopyTimes:
    """Computes when copies arrive. Each network link sends, and each drive reads, one copy after the other.

    Args:
        costs: bandwidths and latencies.
    """

    def __init__(self, costs: CopyCosts) -> None:
        self._costs = costs
        self._links_free_s: dict[ReplicaId, float] = {}
        self._drives_free_s: dict[ReplicaId, float] = {}

    def fetched_s(self, source: ReplicaId, size_bytes: int, now: float) -> float:
        """Return the arrival time of a fetch that is requested now."""
        begins_s = max(now, self._links_free_s.get(source, now))
        self._links_free_s[source] = begins_s + self._costs.link_s(size_bytes)
        return begins_s + self._costs.fetch_s(size_bytes)

    def kv_arrival_s(self, source: ReplicaId, size_bytes: int, now: float) -> float:
        """Return the arrival time of a request's KV that leaves its host now."""
        begins_s = max(now, self._links_free_s.get(source, now))
        self._links_free_s[source] = begins_s + self._costs.kv_transfer_s(size_bytes)
        return self._links_free_s[source]

    def provided_s(self, replica: ReplicaId, size_bytes: int, now: float) -> float:
        """Return the arrival time of a provision that is requested now. Each replica has its own drive."""
        begins_s = max(now, self._drives_free_s.get(replica, now))
        self._drives_free_s[replica] = begins_s + self._costs.provision_s(size_bytes)
        return self._drives_free_s[replica]
