"""A step computes the images that its prompts need, within a budget, and never twice while they are kept."""

import msgspec

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.events import Finished
from lorikeet.core.images import PromptImage
from lorikeet.core.request import Request
from lorikeet.scheduling.state import SchedulerLimits
from tests.support.scripted import BLOCK_TOKENS, Bench, adapter, request

IMAGE = 999


def asked(name: str, *parts: str | int, ref: AdapterRef | None = None, **sampling: object) -> Request:
    """A request whose prompt has numbers of words, and images of six tokens by name."""
    token_ids: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, int):
            token_ids += range(part)
        else:
            images.append(PromptImage(part.encode(), len(token_ids), 6, {}))
            token_ids += [IMAGE] * 6
    made = request(name, token_ids, adapter=ref, **sampling)
    return msgspec.structs.replace(made, images=tuple(images))


def limits(tokens: int, **more: bool) -> SchedulerLimits:
    return SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=tokens, max_model_len=64, **more)


def computed(bench: Bench) -> list[list[bytes]]:
    """The images of each plan that has any."""
    return [[image.key for image in plan.images] for plan in bench.plans if plan.images]


def chunks(bench: Bench, name: str) -> list[tuple[int, int]]:
    """The range of tokens of each step of a request."""
    steps = [step for plan in bench.plans for step in plan.sequences if step.request_id == name]
    return [(step.start, step.start + step.tokens) for step in steps if step.tokens > 1]


def test_an_image_is_computed_once_for_all_requests_that_need_it() -> None:
    bench = Bench(limits=limits(64))
    bench.engine.submit(asked("a", 3, "x", 2))
    bench.engine.submit(asked("b", 4, "x", 2))
    bench.run()
    bench.engine.submit(asked("c", 5, "x", 2, "y"))
    bench.run()
    assert computed(bench) == [[b"x"], [b"y"]]
    stats = bench.engine.stats().images
    assert (stats.computed, stats.computed_tokens, stats.reused) == (2, 12, 1)


def test_adapters_that_leave_the_tower_alone_share_an_image() -> None:
    plain, other = adapter("plain"), adapter("other")
    seeing = msgspec.structs.replace(adapter("seeing"), changes_tower=True)
    bench = Bench(limits=limits(64))
    for number, ref in enumerate((None, plain, other, seeing, seeing)):
        bench.engine.submit(asked(f"r{number}", 3, "x", 2, ref=ref))
        bench.run()
    assert computed(bench) == [[b"x"], [b"x\0digest-seeing"]]


def test_kv_of_another_image_is_not_found() -> None:
    bench = Bench(limits=limits(64))
    for name, image in (("a", "x"), ("b", "y"), ("c", "x")):
        bench.engine.submit(asked(name, 2, image, 8))
        bench.run()
    starts = [start for name in "abc" for start, _ in chunks(bench, name)[:1]]
    assert starts == [0, 0, 12]
    assert starts[2] % BLOCK_TOKENS == 0


def test_a_step_computes_few_images() -> None:
    """Prompts with many images do not stall the answers beside them."""
    bench = Bench(limits=limits(16))
    bench.engine.submit(asked("a", 1, "s", 1, "t", 1, "u", 1, "v", 1))
    bench.engine.submit(asked("b", 1, "s", 1, "w", 1))
    bench.run()
    assert all(len(keys) <= 2 for keys in computed(bench))
    assert sorted(key for keys in computed(bench) for key in keys) == [b"s", b"t", b"u", b"v", b"w"]


def test_images_leave_when_others_need_their_place() -> None:
    bench = Bench(limits=limits(64), image_tokens=12)
    for number, image in enumerate("xyxzy"):
        bench.engine.submit(asked(f"r{number}", 3 + number, image, 2))
        bench.run()
    assert computed(bench) == [[b"x"], [b"y"], [b"z"], [b"y"]]
    dropped = [key for plan in bench.plans for key in plan.dropped_images]
    assert dropped == [b"y", b"x"]
    assert bench.engine.stats().images.kept_tokens == 12


def test_tokens_that_see_each_other_are_computed_in_one_step() -> None:
    bench = Bench(limits=limits(8, whole_images=True))
    bench.engine.submit(asked("a", 5, "x", 3, "y", 1, max_tokens=1))
    bench.run()
    assert chunks(bench, "a") == [(0, 5), (5, 13), (13, 21)]


def test_an_image_that_fills_a_step_does_not_wait_for_running_answers() -> None:
    bench = Bench(limits=limits(6, whole_images=True))
    bench.engine.submit(request("answer", [1, 2], max_tokens=40))
    bench.step()
    bench.engine.submit(asked("a", 3, "x", 1))
    for _ in range(6):
        bench.step()
    assert (3, 9) in chunks(bench, "a")


def test_a_whole_prompt_is_computed_in_one_step_and_shares_no_kv() -> None:
    bench = Bench(limits=limits(24, whole_prompts=True))
    for name, words in (("a", 9), ("b", 10), ("c", 9)):
        bench.engine.submit(asked(name, "x", words))
        bench.run()
    assert chunks(bench, "a") == [(0, 15)]
    assert chunks(bench, "b") == [(0, 16)]
    assert chunks(bench, "c")[0][0] == 12


def test_what_fits_no_step_is_refused() -> None:
    for more, message in (
        ({"whole_images": True}, "an image of 6 tokens exceeds max_num_batched_tokens, 5"),
        ({"whole_prompts": True}, "a prompt with an image of 8 tokens exceeds max_num_batched_tokens, 5"),
    ):
        bench = Bench(limits=limits(5, **more))
        bench.engine.submit(asked("a", 2, "x"))
        bench.run()
        (finished,) = (event for event in bench.events if isinstance(event, Finished))
        assert finished.impossible
        assert finished.error == message
