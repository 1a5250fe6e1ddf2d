"""Schedules a prefill that runs while its adapter is loaded layer by layer, and plans the layer groups.

TOPPINGS, section 4.1: the layers are divided into groups that are loaded one after the other. During the load, the
device computes the LoRA delta of layers that have arrived, and the host computes the delta of all other layers. The
first group is loaded last, because only decodes need it on the device. The paper leaves open how the loader avoids
staying one group behind the computation. This loader may skip a group that would arrive too late
(:func:`look_ahead_order`).
"""

import math
from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

LayerGroup = tuple[int, int]
"""First layer of a group, and the layer after its last (half-open)."""


class ComputePlace(StrEnum):
    """Names the places where the LoRA delta of a layer is computed."""

    HOST = "C"
    DEVICE = "G"


class LayerTimes(NamedTuple):
    """Holds the times of a prefill and of the load of its adapter, in seconds.

    Attributes:
        layers: number of layers of the model.
        host_s: seconds of a layer whose LoRA delta the host computes.
        device_s: seconds of a layer whose LoRA delta the device computes.
        load_s: seconds to transfer one layer of the adapter.
        group_s: overhead per loaded group, in seconds.
    """

    layers: int
    host_s: float
    device_s: float
    load_s: float
    group_s: float

    @property
    def cached_s(self) -> float:
        """Time of the prefill if the adapter is already on the device."""
        return self.layers * self.device_s

    @property
    def load_then_prefill_s(self) -> float:
        """Time to load the adapter in one group and then run the prefill."""
        return self.group_load_s((0, self.layers)) + self.cached_s

    def group_load_s(self, group: LayerGroup) -> float:
        """Return the time to load a group."""
        first, stop = group
        return self.group_s + (stop - first) * self.load_s

    def load_ends_s(self, groups: Sequence[LayerGroup]) -> list[float]:
        """Return the arrival time of each group, in seconds, for groups loaded in this order."""
        return list(accumulate(map(self.group_load_s, groups)))

    def arrivals_s(self, groups: Sequence[LayerGroup]) -> list[float]:
        """Return the arrival time of each layer, for groups loaded in this order that together contain all layers."""
        arrivals = [0.0] * self.layers
        for (first, stop), end_s in zip(groups, self.load_ends_s(groups), strict=True):
            arrivals[first:stop] = [end_s] * (stop - first)
        return arrivals


class PrefillCourse(NamedTuple):
    """Describes the schedule of a prefill.

    Attributes:
        places: place where the LoRA delta of each layer is computed.
        first_token_s: time at which the last layer is done.
        groups: groups of layers in load order.
        resident_s: time at which the whole adapter is on the device, so that the request can decode.
    """

    places: tuple[ComputePlace, ...]
    first_token_s: float
    groups: tuple[LayerGroup, ...]
    resident_s: float

    @property
    def placement(self) -> str:
        """Places as a string, such as ``CCGG``."""
        return "".join(self.places)


class LayerStep(NamedTuple):
    """Describes a layer of a prefill: the place of its LoRA delta, and the layer's start and end."""

    place: ComputePlace
    start_s: float
    end_s: float


def walk(
    times: LayerTimes, arrivals_s: Sequence[float], begin_s: float = 0.0, *, waits: bool = False
) -> list[LayerStep]:
    """Schedule layers dynamically: on the device if a layer has arrived by its start, otherwise on the host.

    Args:
        times: layer times of the prefill.
        arrivals_s: arrival time of each layer.
        begin_s: time at which the first of these layers starts.
        waits: whether a layer waits for its weights if they arrive sooner than the host would finish.
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
    """Schedule the layers of group ``host`` on the host and wait for all others.

    The arguments are those of :func:`walk`.
    """
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
    """Return the schedule by :func:`walk` for ``groups`` loaded in this order, which together contain all layers."""
    arrivals_s = times.arrivals_s(groups)
    return _course(walk(times, arrivals_s, waits=waits), groups, arrivals_s)


def static(times: LayerTimes, groups: Sequence[LayerGroup]) -> PrefillCourse:
    """Return the schedule by :func:`walk_static`, in which the host computes the group that is loaded last."""
    arrivals_s = times.arrivals_s(groups)
    return _course(walk_static(times, arrivals_s, groups[-1]), groups, arrivals_s)


def cut(layers: int, size: int) -> tuple[LayerGroup, ...]:
    """Divide the layers into groups of ``size``, in layer order; the last group may be smaller."""
    return tuple((first, min(first + size, layers)) for first in range(0, layers, size))


def load_order(groups: tuple[LayerGroup, ...]) -> tuple[LayerGroup, ...]:
    """Return ``groups`` (in layer order) in the paper's load order: the first group last."""
    return (*groups[1:], groups[0])


def look_ahead_order(
    times: LayerTimes, groups: tuple[LayerGroup, ...], *, waits: bool = False
) -> tuple[LayerGroup, ...]:
    """Return ``groups`` (in layer order) in an order in which each load arrives in time to help.

    The next group is the first group whose last layer is predicted to start after the end of the group's load. The
    prediction includes earlier loads and assumes that layers of other groups run on the host. Groups that cannot arrive
    in time follow in the order of :func:`load_order`.
    """
    order: list[LayerGroup] = []
    late: list[LayerGroup] = []
    now = walk(times, _never(groups[0]))[-1].end_s
    loaded_s = 0.0
    for group in groups[1:]:  # a late group stays late, because later loads only end later
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
    """Return the schedule with the earliest first token.

    Every group size is tried, in the paper's order and with look-ahead. Among ties, the plan chooses the size for which
    the host's time for a group is nearest to the load time of a group, as in the paper, and then fewer groups. Plans
    are cached, so callers should round prompt sizes.

    Args:
        times: layer times of prefill and load.
        is_static: whether the prefill waits for groups (:func:`static`).
        waits: see :func:`dynamic`.
    """
    best: tuple[tuple[float, float, int], PrefillCourse] | None = None
    for size in range(1, times.layers + 1):
        groups = cut(times.layers, size)
        balance_s = abs(size * times.host_s - times.group_load_s((0, size)))
        courses = [_fixed(times, load_order(groups), is_static, waits)]
        if not is_static:
            courses.append(dynamic(times, look_ahead_order(times, groups, waits=waits), waits=waits))
        for course in courses:
            # Times are rounded to nanoseconds, so that the order of additions makes no difference.
            score = (round(course.first_token_s, 9), round(balance_s, 9), len(groups))
            if best is None or score < best[0]:
                best = score, course
    assert best is not None
    return best[1]


def one_group(times: LayerTimes, *, is_static: bool = False, waits: bool = False) -> PrefillCourse:
    """Return the schedule without pipelining (the paper's M = 1): the adapter is loaded in one group."""
    return _fixed(times, cut(times.layers, times.layers), is_static, waits)


def _fixed(times: LayerTimes, groups: tuple[LayerGroup, ...], is_static: bool, waits: bool) -> PrefillCourse:
    return static(times, groups) if is_static else dynamic(times, groups, waits=waits)


def _never(group: LayerGroup) -> list[float]:
    """Return infinite arrival times for a group's layers."""
    return [math.inf] * (group[1] - group[0])


def _course(steps: list[LayerStep], groups: Sequence[LayerGroup], arrivals_s: Sequence[float]) -> PrefillCourse:
    return PrefillCourse(tuple(step.place for step in steps), steps[-1].end_s, tuple(groups), max(arrivals_s))
