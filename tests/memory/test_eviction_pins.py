"""Pinned adapters are evicted last: they stay while anything else can go, and starve no request."""

import pytest

from lorikeet.core.events import Finished, FinishReason
from lorikeet.presets import PRESETS
from tests.support.scripted import BLOCK_TOKENS, Bench, adapter, request

SOME = ("lorikeet:auto", "lorikeet:plain", "elora", "elora:wom", "chameleon", "s-lora")


def ask(bench: Bench, name: str, adapter_name: str, prompt_tokens: int = 3, blocks: int = 2) -> None:
    """Let one request run to its end, alone."""
    words = [ord(adapter_name[0]) + index for index in range(prompt_tokens)]
    bench.engine.submit(request(name, words, bench.clock.now(), adapter(adapter_name, blocks), max_tokens=2))
    bench.run()


@pytest.mark.parametrize("preset", [name for name in SOME if name in PRESETS])
@pytest.mark.parametrize("host_blocks", [0, 6])
def test_a_pinned_adapter_stays_while_others_come_and_go(preset: str, host_blocks: int) -> None:
    bench = Bench(blocks=14, host_blocks=host_blocks, preset=PRESETS[preset])
    bench.engine.pin_adapters((adapter("kept").digest,))
    ask(bench, "first", "kept")
    for index, name in enumerate("abcdefgh"):
        ask(bench, f"{index}", name)
    assert adapter("kept").digest in bench.memory.resident()
    bench.engine.pin_adapters(())
    for index, name in enumerate("ijklmnop"):
        ask(bench, f"{index + 9}", name)
    assert adapter("kept").digest not in bench.memory.resident()


def test_pinned_adapter_is_evicted_if_a_request_could_not_run_otherwise() -> None:
    bench = Bench(blocks=10)
    bench.engine.pin_adapters((adapter("kept").digest,))
    ask(bench, "first", "kept", blocks=4)
    ask(bench, "second", "large", prompt_tokens=6 * BLOCK_TOKENS, blocks=3)
    assert {event.reason for event in bench.events if isinstance(event, Finished)} == {FinishReason.LENGTH}
    assert adapter("kept").digest not in bench.memory.resident()
    ask(bench, "third", "kept", blocks=4)
    assert adapter("kept").digest in bench.memory.resident()


def test_a_pinned_adapter_that_is_removed_is_freed() -> None:
    bench = Bench(blocks=10)
    bench.engine.pin_adapters((adapter("kept").digest,))
    ask(bench, "first", "kept")
    bench.engine.drop_adapter(adapter("kept").digest)
    bench.run()
    assert not bench.memory.resident()
