"""Images of a prompt on their way to the engine."""

import msgspec

from lorikeet.core.images import ImageTensor, PromptImage
from lorikeet.core.messages import Submit
from lorikeet.core.request import Request, SamplingParams


def test_a_request_keeps_its_images_on_the_channel() -> None:
    grid = ImageTensor("int64", (1, 3), bytes(24))
    pixels = ImageTensor("float32", (4, 2), bytes(32))
    image = PromptImage(b"d" * 32, 2, 3, {"pixel_values": pixels, "image_grid_thw": grid})
    request = Request("r", [1, 2, 7, 7, 7, 3], SamplingParams(4), 0.0, images=(image,))
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(Submit(request)), type=Submit)
    assert sent.request == request


def test_a_request_without_images_has_none() -> None:
    plain = Request("r", [1], SamplingParams(4), 0.0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plain), type=Request).images == ()
