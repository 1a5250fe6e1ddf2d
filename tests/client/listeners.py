"""A listener of a supervisor that records its calls."""

import asyncio

from lorikeet.client.supervisor import EngineError, EngineSupervisor
from lorikeet.core.messages import StepOutputs


class FakeListener:
    """Says that three requests were resumed."""

    def __init__(self) -> None:
        self.failure = asyncio.get_running_loop().create_future()
        self.received: list[StepOutputs] = []

    def on_outputs(self, supervisor: EngineSupervisor, outputs: StepOutputs) -> None:
        self.received.append(outputs)

    def on_exit(self, supervisor: EngineSupervisor, code: int | None) -> None: ...

    def on_restart(self, supervisor: EngineSupervisor) -> int:
        return 3

    def on_failed(self, supervisor: EngineSupervisor, failure: EngineError) -> None:
        self.failure.set_result(failure)
