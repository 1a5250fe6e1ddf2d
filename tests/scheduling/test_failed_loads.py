"""Whose request ends when the transfer of an adapter fails."""

from lorikeet.core.events import FinishReason
from lorikeet.core.ids import AdapterDigest, RequestId
from tests.support.scripted import Bench, adapter, request


def test_a_failed_load_ends_those_that_were_there_when_it_began_and_no_others() -> None:
    bench = Bench(failing=frozenset({AdapterDigest("digest-a")}))
    for name in ("first", "second"):
        bench.engine.submit(request(name, [1, 2, 3], adapter=adapter("a")))
    bench.step()
    bench.clock.advance(0.01)
    bench.engine.submit(request("late", [1, 2, 3], 0.01, adapter("a")))
    while not bench.finished():
        bench.step()
    assert {name: end.reason for name, end in bench.finished().items()} == {
        RequestId("first"): FinishReason.ERROR,
        RequestId("second"): FinishReason.ERROR,
    }
    bench.executor._failing = frozenset()  # the files are whole again
    bench.run()
    assert bench.finished()[RequestId("late")].reason is FinishReason.LENGTH
