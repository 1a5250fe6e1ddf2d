"""Which bin of a placement becomes which replica, so that as little as possible moves."""

from collections.abc import Callable, Collection, Mapping, Sequence
from math import gcd

import numpy as np
from scipy.optimize import linear_sum_assignment

from lorikeet.cluster.tables import Share
from lorikeet.core.ids import AdapterDigest, ReplicaId

Bin = Mapping[AdapterDigest, float]
"""What one replica is to serve: adapters, and which part of each."""


def least_movement(
    bins: Sequence[Bin],
    replicas: Sequence[ReplicaId],
    held_by: Callable[[AdapterDigest], Collection[ReplicaId]],
    routed: Mapping[AdapterDigest, tuple[Share, ...]],
    sizes_bytes: Mapping[AdapterDigest, int],
) -> list[ReplicaId]:
    """Return a replica for each bin, so that the fewest bytes of adapters come to replicas that did not have them.

    Among equals, the one under which most requests stay where they went. What is then still equal is as the solver
    leaves it, which for bins that all the replicas know equally well is the order given.

    Source: LoRAServe, Algorithm 1, step 5; an assignment of least cost is our reading of "least deviation".

    Args:
        bins: as many as replicas, which are taken to be equal machines.
        replicas: those that there are.
        held_by: who had an adapter before; replicas that are gone may be among them.
        routed: the shares before.
        sizes_bytes: of every adapter.
    """
    place = {replica: index for index, replica in enumerate(replicas)}
    stays_bytes = np.zeros((len(bins), len(replicas)))
    stays_share = np.zeros_like(stays_bytes)
    for number, content in enumerate(bins):
        for adapter, part in content.items():
            for replica in held_by(adapter):
                if replica in place:
                    stays_bytes[number, place[replica]] += sizes_bytes[adapter]
            for replica, share in routed.get(adapter, ()):
                if replica in place:
                    stays_share[number, place[replica]] += min(part, share)
    # One matrix for both aims: bytes in their largest common unit, so that all shares together weigh less than one.
    unit_bytes = gcd(*sizes_bytes.values()) or 1
    gain = stays_bytes / unit_bytes + stays_share / (2 * len(sizes_bytes) + 1)
    numbers, places = linear_sum_assignment(gain, maximize=True)
    assert np.array_equal(numbers, np.arange(len(bins)))
    return [replicas[index] for index in places]
