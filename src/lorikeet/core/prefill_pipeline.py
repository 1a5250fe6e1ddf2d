"""A prefill beside the transfer of its adapter, layer by layer, and the planner of layer groups.

TOPPINGS, section 4.1: the layers are cut into groups that are loaded one after the other. While the adapter arrives, a
layer whose group is there is computed on the device, any other takes what the adapter adds from the host. The first
group is loaded last: only decodes need it on the device. The paper does not say how a loader avoids being one group
behind the computation for ever; here it may skip a group that would come too late (:func:`look_ahead_order`).
"""

import math
from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

LayerGroup = tuple[int, int]
"""First layer, and the layer after the last."""


class ComputePlace(StrEnum):
    """Where what the adapter adds to a layer is computed."""

    HOST = "C"
    DEVICE = "G"


class LayerTimes(NamedTuple):
    """What a prefill and the load of its adapter take, in seconds.

    Attributes:
        layers: of the model.
        host_s: a layer on which the host computes for the adapter.
        device_s: a layer on which the device does.
        load_s: the adapter's share of one layer over the link.
        group_s: once per group that is loaded.
    """

    layers: int
    host_s: float
    device_s: float
    load_s: float
    group_s: float

    @property
    def cached_s(self) -> float:
        """The prefill if the adapter is there already."""
        return self.layers * self.device_s

    @property
    def load_then_prefill_s(self) -> float:
        """The load in one piece, and then the prefill."""
        return self.group_load_s((0, self.layers)) + self.cached_s

    def group_load_s(self, group: LayerGroup) -> float:
        """Return how long a group takes over the link."""
        first, stop = group
        return self.group_s + (stop - first) * self.load_s

    def load_ends_s(self, groups: Sequence[LayerGroup]) -> list[float]:
        """Return when each group has arrived if they are loaded in this order."""
        return list(accumulate(map(self.group_load_s, groups)))

    def arrivals_s(self, groups: Sequence[LayerGroup]) -> list[float]:
        """Return when each layer has arrived if the groups, together all layers, are loaded in this order."""
        arrivals = [0.0] * self.layers
        for (first, stop), end_s in zip(groups, self.load_ends_s(groups), strict=True):
            arrivals[first:stop] = [end_s] * (stop - first)
        return arrivals


class PrefillCourse(NamedTuple):
    """How a prefill goes.

    Attributes:
        places: of each layer.
        first_token_s: when its last layer is done.
        groups: in load order.
        resident_s: when the whole adapter is on the device, so that the request may decode.
    """

    places: tuple[ComputePlace, ...]
    first_token_s: float
    groups: tuple[LayerGroup, ...]
    resident_s: float

    @property
    def placement(self) -> str:
        """The places as a word, such as ``CCGG``."""
        return "".join(self.places)


class LayerStep(NamedTuple):
    """One layer of a prefill: where the adapter's part is computed, when its turn comes, and when it is done."""

    place: ComputePlace
    start_s: float
    end_s: float


def walk(
    times: LayerTimes, arrivals_s: Sequence[float], begin_s: float = 0.0, *, waits: bool = False
) -> list[LayerStep]:
    """Compute each layer where that is possible when its turn comes.

    Args:
        times: of the prefill.
        arrivals_s: when each layer arrives.
        begin_s: when the turn of the first of them comes.
        waits: whether a layer waits for its arrival where that is sooner than the host.
    """
    steps = []
    now = begin_s
    for arrival_s in arrivals_s:
        delay_s = max(0.0, arrival_s - now)
        if delay_s == 0 or (waits and delay_s < times.host_s - times.device_s):
            step = LayerStep(ComputePlace.DEVICE, now, now + delay_s + times.device_s)
        else:
            step = LayerStep(ComputePlace.HOST, now, now + times.host_s)
        steps.append(step)
        now = step.end_s
    return steps


def walk_static(times: LayerTimes, arrivals_s: Sequence[float], host: LayerGroup) -> list[LayerStep]:
    """Compute the layers of ``host`` there, and wait for the others; arguments as for :func:`walk`."""
    steps = []
    now = 0.0
    for layer, arrival_s in enumerate(arrivals_s):
        if host[0] <= layer < host[1]:
            step = LayerStep(ComputePlace.HOST, now, now + times.host_s)
        else:
            step = LayerStep(ComputePlace.DEVICE, now, max(now, arrival_s) + times.device_s)
        steps.append(step)
        now = step.end_s
    return steps


def dynamic(times: LayerTimes, groups: Sequence[LayerGroup], *, waits: bool = False) -> PrefillCourse:
    """Return the course by :func:`walk` while ``groups``, all layers, are loaded in this order."""
    arrivals_s = times.arrivals_s(groups)
    return _course(walk(times, arrivals_s, waits=waits), groups, arrivals_s)


def static(times: LayerTimes, groups: Sequence[LayerGroup]) -> PrefillCourse:
    """Return the course by :func:`walk_static`, where the host has the group that is loaded last."""
    arrivals_s = times.arrivals_s(groups)
    return _course(walk_static(times, arrivals_s, groups[-1]), groups, arrivals_s)


def cut(layers: int, size: int) -> tuple[LayerGroup, ...]:
    """Return the groups of ``size`` layers, the last one of what remains, in the order of the layers."""
    return tuple((first, min(first + size, layers)) for first in range(0, layers, size))


def load_order(groups: tuple[LayerGroup, ...]) -> tuple[LayerGroup, ...]:
    """Return groups (in the order of the layers) in the paper's load order: the first group last."""
    return (*groups[1:], groups[0])


def look_ahead_order(
    times: LayerTimes, groups: tuple[LayerGroup, ...], *, waits: bool = False
) -> tuple[LayerGroup, ...]:
    """Return groups (in the order of the layers) in the order in which loads help.

    Next comes the first group whose last layer is predicted to start no sooner than its load would end. The prediction
    knows the loads before it, and leaves layers of other groups to the host. When no group is left that could come in
    time, the others follow in the order of :func:`load_order`.
    """
    order: list[LayerGroup] = []
    late: list[LayerGroup] = []
    now = walk(times, _never(groups[0]))[-1].end_s
    loaded_s = 0.0
    for group in groups[1:]:  # who is late once stays so: loads that are chosen after it only end later
        end_s = loaded_s + times.group_load_s(group)
        steps = walk(times, _never(group), now)
        if steps[-1].start_s >= end_s:
            order.append(group)
            loaded_s = end_s
            steps = walk(times, [end_s] * len(steps), now, waits=waits)
        else:
            late.append(group)
        now = steps[-1].end_s
    return (*order, *late, groups[0])


@lru_cache(maxsize=4096)
def plan(times: LayerTimes, *, is_static: bool = False, waits: bool = False) -> PrefillCourse:
    """Return the course whose groups bring the first token soonest.

    Every size of group is tried, in the paper's order and with look-ahead. Of equally soon ones that size is chosen for
    which the host's time for a group is nearest to the load of one, as the paper has it, and then the fewest groups.
    Plans are kept, so times had better come from few sizes of prompt.

    Args:
        times: of prefill and load.
        is_static: whether groups are waited for (:func:`static`).
        waits: as for :func:`dynamic`.
    """
    best: tuple[tuple[float, float, int], PrefillCourse] | None = None
    for size in range(1, times.layers + 1):
        groups = cut(times.layers, size)
        balance_s = abs(size * times.host_s - times.group_load_s((0, size)))
        courses = [_fixed(times, load_order(groups), is_static, waits)]
        if not is_static:
            courses.append(dynamic(times, look_ahead_order(times, groups, waits=waits), waits=waits))
        for course in courses:
            # To the nanosecond: sums in another order are not another time.
            score = (round(course.first_token_s, 9), round(balance_s, 9), len(groups))
            if best is None or score < best[0]:
                best = score, course
    assert best is not None
    return best[1]


def one_group(times: LayerTimes, *, is_static: bool = False, waits: bool = False) -> PrefillCourse:
    """Return the course without pipelining (the paper's M = 1): the adapter arrives at once."""
    return _fixed(times, cut(times.layers, times.layers), is_static, waits)


def _fixed(times: LayerTimes, groups: tuple[LayerGroup, ...], is_static: bool, waits: bool) -> PrefillCourse:
    return static(times, groups) if is_static else dynamic(times, groups, waits=waits)


def _never(group: LayerGroup) -> list[float]:
    """Return arrivals of a group's layers that do not come."""
    return [math.inf] * (group[1] - group[0])


def _course(steps: list[LayerStep], groups: Sequence[LayerGroup], arrivals_s: Sequence[float]) -> PrefillCourse:
    return PrefillCourse(tuple(step.place for step in steps), steps[-1].end_s, tuple(groups), max(arrivals_s))
