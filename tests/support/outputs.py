"""Reads the outputs of a submitted request one after the other."""

import asyncio
from collections.abc import AsyncIterator

from lorikeet.client.client import RequestHandle, RequestOutput
from lorikeet.client.supervisor import EngineError

Arrived = asyncio.Queue[RequestOutput | EngineError]


async def outputs_of(handle: RequestHandle, arrived: Arrived | None = None) -> AsyncIterator[RequestOutput]:
    """Yield the outputs of a request until it has finished; to be called once.

    Args:
        handle: of the request.
        arrived: gets the outputs; what comes after the last one stays there.

    Raises:
        EngineError: the engine has ended and will not be restarted.
    """
    arrived = Arrived() if arrived is None else arrived
    handle.listen(arrived.put_nowait)
    while True:
        output = await arrived.get()
        if isinstance(output, EngineError):
            raise output
        yield output
        if output.finished is not None:
            return
