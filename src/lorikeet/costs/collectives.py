"""Time of the all-reduce that ends attention and feed-forward of a layer under tensor parallelism."""

from collections.abc import Callable

import numpy as np

from lorikeet.costs.devices import DEVICES, Device
from lorikeet.costs.tables import SOURCE, all_reduce_medians


def all_reduce(device: Device, workers: int) -> tuple[Callable[[int], float], str]:
    """Return seconds as a function of bytes, and where they come from.

    Measured where there is a table, linear between its sizes. On another device with the same kind of links every
    message takes longer by what a ring's bytes, 2 (w - 1) / w of the message over each link, take longer at the links'
    full rate. Without a table it is that ring alone.
    """
    medians = all_reduce_medians(device.measured, workers)
    if workers == 1:
        return lambda _: 0.0, "none"
    ring = 2 * (workers - 1) / workers
    if medians is None:
        ring_s = ring / device.peer_bytes_per_s
        return lambda size: ring_s * size, "all-reduce as a ring over PCI Express by data sheet, not measured"
    sizes, seconds = np.array(list(medians)), np.array(list(medians.values()))
    slower_s = ring * (1 / device.peer_bytes_per_s - 1 / DEVICES[device.measured].peer_bytes_per_s)
    source = SOURCE if slower_s == 0 else f"{SOURCE} of {device.measured}, slower by what a ring on these links adds"
    return lambda size: float(np.interp(size, sizes, seconds)) + slower_s * size, f"all-reduce from {source}"
