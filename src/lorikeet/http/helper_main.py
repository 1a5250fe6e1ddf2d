"""Runs the main loop of a helper process; ``http/helper_processes.py`` is the side of the API process."""

import os
import resource
import struct
import sys
from collections.abc import Callable
from typing import BinaryIO

from lorikeet.core.process_tuning import lower_priority, return_freed_memory

LENGTH = struct.Struct("!Q")
"""Before a message."""


def run_helper(prepare: Callable[[bytes], Callable[[bytes], bytes]], memory_bytes: int) -> None:
    """Answer messages from standard input until it ends.

    Args:
        prepare: takes the setup, which is the first message, and returns the function that answers the others.
        memory_bytes: address space for an answer, beyond the address space of the ready process. An answer that needs
            more raises MemoryError or ends the process.
    """
    answers = os.fdopen(os.dup(1), "wb")
    messages = sys.stdin.buffer
    os.dup2(2, 1)  # Output that a library prints must not become a message.
    answer = prepare(_exactly(messages, LENGTH.unpack(_exactly(messages, LENGTH.size))[0]))
    lower_priority()
    _limit_memory(memory_bytes)
    _send(answers, b"")
    while head := messages.read(LENGTH.size):
        _send(answers, answer(_exactly(messages, LENGTH.unpack(head)[0])))
        return_freed_memory()


def _limit_memory(memory_bytes: int) -> None:
    if sys.platform != "linux":
        return
    with open("/proc/self/statm", encoding="ascii") as statm:
        taken = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + memory_bytes, taken + memory_bytes))


def _exactly(stream: BinaryIO, length: int) -> bytes:
    content = stream.read(length)
    if len(content) < length:
        raise SystemExit  # The API process has ended.
    return content


def _send(stream: BinaryIO, content: bytes) -> None:
    stream.write(LENGTH.pack(len(content)))
    stream.write(content)
    stream.flush()
