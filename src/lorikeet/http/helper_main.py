"""The main loop of a helper process; the API process's side is ``http/helper_processes.py``."""

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
        prepare: called with the setup, which is the first message; returns what answers the others.
        memory_bytes: address space that an answer may take beside what is taken when the process is ready. An answer
            that needs more raises MemoryError or ends the process.
    """
    answers, messages = os.fdopen(os.dup(1), "wb"), sys.stdin.buffer
    os.dup2(2, 1)  # whatever a library prints is no message
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
        raise SystemExit  # the API process is gone
    return content


def _send(stream: BinaryIO, content: bytes) -> None:
    stream.write(LENGTH.pack(len(content)))
    stream.write(content)
    stream.flush()
