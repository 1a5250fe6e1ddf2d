"""The host arena: shared, of a fixed size, empty if asked."""

import os

import numpy as np
import pytest

from lorikeet.memory.host_arena import HostArena


def test_every_process_with_the_descriptor_sees_the_same_blocks() -> None:
    arena = HostArena.create(3, 5)
    assert not arena.bytes.any()
    other = HostArena.attached(os.dup(arena.fd), 5)
    assert other.bytes.shape == (3, 5)
    arena.bytes[1] = 7
    other.bytes[2, 4] = 9
    assert np.array_equal(other.bytes, arena.bytes)
    assert other.bytes.sum() == 5 * 7 + 9
    used = other.bytes
    arena.close()
    other.close()
    assert used[1, 0] == 7
    assert other.bytes.shape == (0, 5)


def test_its_size_cannot_be_changed() -> None:
    arena = HostArena.create(1, 4096)
    for size_bytes in (0, 8192):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size_bytes)
    arena.close()


def test_an_arena_of_no_blocks_can_be_shared_too() -> None:
    arena = HostArena.create(0, 7)
    other = HostArena.attached(os.dup(arena.fd), 7)
    assert arena.bytes.shape == other.bytes.shape == (0, 7)
    arena.close()
    other.close()
