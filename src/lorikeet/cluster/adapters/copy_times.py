"""How long copies of adapters take between replicas, and from their files, by a model.

Source: LoRAServe, section IV-B, which moves adapters from GPU to GPU over InfiniBand; figure 14 says, without numbers,
that this takes about as long as from a host to its own GPU, and that a drive is too slow. The figures here are ours.
"""

from enum import StrEnum

import msgspec

from lorikeet.core.ids import ReplicaId


class FetchForm(StrEnum):
    """How the bytes of an adapter come from another machine."""

    PIPELINED = "pipelined"
    """From device to device, in pieces: while one crosses the network, the next leaves its host."""
    STORE_AND_FORWARD = "store-and-forward"
    """Into the host's memory as a whole, and from there to the device like any other."""


class CopyCosts(msgspec.Struct, frozen=True):
    """What the times of copies are made of.

    What a replica has lies in its host's memory, and still comes from there to its device when it is asked for; the
    engine itself takes that time (``local_s``), so it is no part of what comes before.

    Attributes:
        form: of fetches.
        host_bytes_per_s: between a host and each rank's device: PCI Express 4.0 with 16 lanes, of whose 32 GB/s about
            25 are reached. Must be what engines take.
        network_bytes_per_s: between two machines: InfiniBand HDR, 200 Gbit/s less what protocols take.
        drive_bytes_per_s: from an adapter's own files: a solid-state drive in a cloud machine.
        latency_s: of each copy between machines, or from files.
        ranks: of a replica; each moves its part, all at once.
    """

    form: FetchForm = FetchForm.PIPELINED
    host_bytes_per_s: float = 25e9
    network_bytes_per_s: float = 24e9
    drive_bytes_per_s: float = 2e9
    latency_s: float = 50e-6
    ranks: int = 1

    def local_s(self, size_bytes: int) -> float:
        """Return the time that the engine takes from a replica's host to its device."""
        return size_bytes / self.ranks / self.host_bytes_per_s

    def link_s(self, size_bytes: int) -> float:
        """Return how long a fetch occupies the link of its source."""
        if self.form is FetchForm.PIPELINED:
            return self._over(size_bytes, min(self.host_bytes_per_s, self.network_bytes_per_s))
        return self._over(size_bytes, self.network_bytes_per_s)

    def fetch_s(self, size_bytes: int) -> float:
        """Return the time from the beginning of a fetch until its request can be handed over."""
        link_s = self.link_s(size_bytes)
        return link_s - self.local_s(size_bytes) if self.form is FetchForm.PIPELINED else link_s

    def carry_s(self, size_bytes: int) -> float:
        """Return the time that KV of a request takes from one host's memory to another's."""
        return self._over(size_bytes, self.network_bytes_per_s)

    @property
    def carried_bytes_per_s(self) -> float:
        """How fast KV goes from device to device by way of both hosts."""
        return self.ranks / (2 / self.host_bytes_per_s + 1 / self.network_bytes_per_s)

    def provision_s(self, size_bytes: int) -> float:
        """Return the time to read an adapter from its own files into a host's memory."""
        return self._over(size_bytes, self.drive_bytes_per_s)

    def _over(self, size_bytes: int, bytes_per_s: float) -> float:
        return self.latency_s + size_bytes / self.ranks / bytes_per_s


class CopyTimes:
    """When copies have come, if each source sends one after the other, and so does each drive.

    Args:
        costs: of single copies.
    """

    def __init__(self, costs: CopyCosts) -> None:
        self._costs = costs
        self._links_free_s: dict[ReplicaId, float] = {}
        self._drives_free_s: dict[ReplicaId, float] = {}

    def fetched_s(self, source: ReplicaId, size_bytes: int, now: float) -> float:
        """Return when a fetch that is asked for now has come."""
        begins_s = max(now, self._links_free_s.get(source, now))
        self._links_free_s[source] = begins_s + self._costs.link_s(size_bytes)
        return begins_s + self._costs.fetch_s(size_bytes)

    def carried_s(self, source: ReplicaId, size_bytes: int, now: float) -> float:
        """Return when the KV of a request has come that leaves its host now."""
        begins_s = max(now, self._links_free_s.get(source, now))
        self._links_free_s[source] = begins_s + self._costs.carry_s(size_bytes)
        return self._links_free_s[source]

    def provided_s(self, replica: ReplicaId, size_bytes: int, now: float) -> float:
        """Return when a provision that is asked for now has come; drives are those of the replicas."""
        begins_s = max(now, self._drives_free_s.get(replica, now))
        self._drives_free_s[replica] = begins_s + self._costs.provision_s(size_bytes)
        return self._drives_free_s[replica]
