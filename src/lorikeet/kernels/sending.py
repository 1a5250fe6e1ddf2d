"""What the host tells a device."""

import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host's where kernels on a device can read it; the host does not wait for the copy.

    It would wait for a copy from memory that is not registered, and for all that the device has to do before: for ever,
    if that in turn waits for something that the calling thread has still to do, as an assisted prefill does.
    """
    registered = tensor.pin_memory() if device.type == "cuda" else tensor
    return registered.to(device, non_blocking=True)
