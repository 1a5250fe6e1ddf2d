"""Models that see answer as transformers and PEFT do, with images in one batch, in chunks, and from the cache."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from lorikeet.adapters.store import reference
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.events import Finished
from lorikeet.core.request import Request
from lorikeet.engine.build import build_replica
from lorikeet.memory.packing import pack
from lorikeet.models.parallel import SingleRankGroup
from lorikeet.models.towers import Tower
from lorikeet.models.transformers_decoder import decoder_of
from lorikeet.worker.rank_setup import load_rank
from tests.models.library_bases import VOCABULARY, NotTried
from tests.models.library_runs import (
    MAX_MODEL_LEN,
    Outcome,
    geometry_of,
    linear_layers,
    make_peft_adapter,
    request,
    run,
    settings_of,
)
from tests.models.vision_bases import (
    KINDS,
    REFUSED,
    SPECIAL,
    Seen,
    image_row,
    make_vision_base,
    marks,
    prompt_with,
    why_without_images,
)
from tests.support import sampling

PAGE = Path(__file__).parents[2] / "docs/models.md"
SERVED = sorted(KINDS.keys() - REFUSED)
WITH_TOWER_ADAPTERS = (
    *("gemma3", "gemma4", "idefics3", "internvl", "llama4", "llava", "llava_next", "llava_onevision", "mistral3"),
    *("paligemma", "qwen2_5_vl", "qwen3_5", "qwen3_vl", "smolvlm"),
)
OWN = ("gemma3", "qwen3_5")
"""Kinds whose language model our decoder runs."""
SAMPLE = ("gemma3", "gemma4", "idefics3", "llava_next", "paligemma", "qwen3_5", "qwen3_vl")
"""Images that see themselves, in all layers or in some; rows of tiles; ends of rows; prompts that see themselves; three
axes, by our decoder; and embeddings of later layers."""


def asked(name: str, seen: Seen, adapter: AdapterRef | None, tokens: int) -> Request:
    """A greedy request with images, which does not answer by placeholders."""
    made = request(name, seen.token_ids, adapter, tokens, logit_bias=tuple((each, -100.0) for each in SPECIAL))
    return msgspec.structs.replace(made, images=seen.images)


def expected(model: PeftModel, seen: Seen, token_ids: list[int], *, adapted: bool) -> Tensor:
    """What transformers computes in one pass, ``[tokens, vocabulary]``."""
    ids = torch.tensor([token_ids])
    given: dict[str, Any] = {**seen.given, **marks(model.base_model.model, ids, len(seen.token_ids))}
    model.base_model.model.base_model.rope_deltas = None
    with torch.inference_mode():
        if adapted:
            return model(input_ids=ids, use_cache=False, **given).logits[0].log_softmax(-1)
        with model.disable_adapter():
            return model(input_ids=ids, use_cache=False, **given).logits[0].log_softmax(-1)


def worst(outcome: Outcome, asks: Sequence[tuple[Request, Seen]], model: PeftModel) -> float:
    """The largest difference of a log probability, relative to large ones."""
    found = 0.0
    for each, seen in asks:
        answer = outcome.tokens[each.request_id]
        assert len(answer) == each.sampling.max_tokens
        token_ids = [*seen.token_ids, *(token.token_id for token in answer)]
        wanted = expected(model, seen, token_ids, adapted=each.adapter is not None)
        for position, token in enumerate(answer, start=len(seen.token_ids) - 1):
            values = torch.full((VOCABULARY,), torch.nan)
            for token_id, logprob in token.top:
                values[token_id] = logprob
            difference = (values - wanted[position]) / (1 + 0.1 * wanted[position].abs())
            found = max(found, float(difference.abs().max()))
    return found


def language_layers(model: PreTrainedModel) -> list[str]:
    below = [name for name, _ in linear_layers(model) if "lm_head" not in name]
    return [
        name
        for name in below
        if "language_model" in name or "text_model.layers" in name or name.startswith("model.layers")
    ]


class Served(NamedTuple):
    """A tiny base with an adapter, and prompts with images."""

    folder: Path
    model_impl: str
    base: PreTrainedModel
    peft: PeftModel
    ref: AdapterRef
    prompts: list[Seen]


def serve(folder: Path, kind: str) -> Served:
    base = make_vision_base(folder / "base", kind)
    peft = make_peft_adapter(base, folder / "adapter", target_modules=language_layers(base))
    impl = "lorikeet" if kind in OWN else "transformers"
    ref = reference("a", folder / "adapter", geometry_of(folder / "base", impl))
    prompts = [prompt_with(base, kind, numbers, 7) for numbers in ((0, 1), (1,), (2, 0), ())]
    return Served(folder / "base", impl, base, peft, ref, prompts)


def both(served: Served, name: str, tokens: int) -> list[tuple[Request, Seen]]:
    """Requests of base and adapter for each prompt."""
    return [
        (asked(f"{name}{number}{adapter is None}", seen, adapter, tokens), seen)
        for number, seen in enumerate(served.prompts)
        for adapter in (None, served.ref)
    ]


@pytest.mark.parametrize("kind", sorted(SERVED if sampling.runs_all else SAMPLE))
def test_prompts_with_images_are_answered_as_by_transformers(tmp_path: Path, kind: str) -> None:
    """Several images, an adapter and the base in one batch, in chunks; then prefixes from the cache."""
    served = serve(tmp_path, kind)
    first = both(served, "first", 4)
    again = both(served, "again", 3)
    longest = max(len(seen.token_ids) for seen in served.prompts)
    most = longest if kind == "paligemma" else longest // 2
    settings = settings_of(served.folder, served.model_impl, max_num_batched_tokens=most)
    if longest > MAX_MODEL_LEN - 4:
        settings = msgspec.structs.replace(settings, model=msgspec.structs.replace(settings.model, max_model_len=512))
    outcome = run(settings, [[each for each, _ in first], [each for each, _ in again]])
    assert worst(outcome, first + again, served.peft) < 1e-4
    assert outcome.cached_tokens > 0


@pytest.mark.parametrize("kind", sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES) if sampling.runs_all else ["ovis2"])
def test_the_table_says_which_classes_take_images(kind: str) -> None:
    try:
        reason = why_without_images(kind)
    except NotTried as error:
        reason = str(error)
    assert bool(reason) == (kind not in SERVED)
    assert image_row(kind, reason) in PAGE.read_text().splitlines(), "run docs/make_models.py"


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl"])
def test_preempted_prompts_with_images_go_on(tmp_path: Path, kind: str) -> None:
    served = serve(tmp_path, kind)
    crowd = [each for number in range(4) for each in both(served, f"crowd{number}.", 20)]
    geometry = geometry_of(served.folder, served.model_impl)
    elements = geometry.block_elements(4)
    blocks = MAX_MODEL_LEN // 4 + pack(geometry.full_ranks(8), geometry, elements).blocks
    memory_bytes = blocks * geometry.block_bytes(4)
    settings = settings_of(served.folder, served.model_impl, memory_bytes=memory_bytes, max_num_seqs=len(crowd))
    outcome = run(settings, [[each for each, _ in crowd]])
    assert outcome.preemptions > 0
    assert worst(outcome, crowd, served.peft) < 1e-4


def test_an_image_that_the_tower_cannot_compute_fails_its_request_alone(tmp_path: Path) -> None:
    served = serve(tmp_path, "llava")
    one, other, *_ = served.prompts
    (image,) = other.images
    shorter = msgspec.structs.replace(image, length=image.length - 1)
    lacking = msgspec.structs.replace(image, tensors={}, digest=b"lacking")
    engine = build_replica(settings_of(served.folder, served.model_impl)).engine
    try:
        asks = [
            asked("good", one, served.ref, 2),
            msgspec.structs.replace(asked("short", other, None, 2), images=(shorter,)),
            msgspec.structs.replace(asked("lacking", other, None, 2), images=(lacking,)),
        ]
        for each in asks:
            engine.submit(each)
        ended: dict[str, str] = {}
        while engine.has_requests:
            for event in engine.step().events:
                if isinstance(event, Finished):
                    ended[event.request_id] = event.error or ""
    finally:
        engine.close()
    assert ended["good"] == ""
    assert "Image features and image tokens do not match" in ended["short"]
    assert ended["lacking"] == "the image at token 5: the processor gave nothing, and no pixel_values"


class _TwoRanks(SingleRankGroup):
    size = 2


@pytest.mark.parametrize(
    ("options", "group", "reason"),
    [
        ({}, _TwoRanks(), "they need one rank"),
        ({"quantization": "int8"}, SingleRankGroup(), "they need weights in 16 or 32 bits with Lorikeet's decoder"),
        ({"kv_cache_dtype": "int8"}, SingleRankGroup(), "they need KV in 16 or 32 bits with Lorikeet's decoder"),
    ],
)
def test_our_decoder_says_why_it_refuses_images(
    tmp_path: Path, options: dict[str, str], group: SingleRankGroup, reason: str
) -> None:
    make_vision_base(tmp_path, "gemma3")
    settings = settings_of(tmp_path, "lorikeet")
    parts = {"model": settings.model, "engine": settings.engine}
    for name, value in options.items():
        part = "model" if name == "quantization" else "engine"
        parts[part] = msgspec.structs.replace(parts[part], **{name: value})
    info = load_rank(msgspec.structs.replace(settings, **parts), tmp_path, group).base_info()
    assert not info.takes_images
    assert info.images_refused.startswith(reason)


def test_quantised_weights_of_a_library_model_answer_about_images(tmp_path: Path) -> None:
    base = make_vision_base(tmp_path, "llava")
    settings = settings_of(tmp_path)
    model = msgspec.structs.replace(settings.model, quantization="int8")
    seen = prompt_with(base, "llava", (0, 1), 7)
    outcome = run(msgspec.structs.replace(settings, model=model), [[asked("quantised", seen, None, 3)]])
    assert len(outcome.tokens["quantised"]) == 3
    assert outcome.images.computed == 2


def everywhere(model: PreTrainedModel) -> list[str]:
    """Names of the linear layers and convolutions on which adapters act, of language model, projector and tower."""
    modules = Tower.of(model, decoder_of(model)).modules
    return [*language_layers(model), *(modules.prefix + name for name in sorted(modules.adaptable))]


PROJECTORS = {
    "gemma4": "embed_vision",
    **dict.fromkeys(("idefics3", "smolvlm"), "connector"),
    **dict.fromkeys(("qwen2_5_vl", "qwen3_5", "qwen3_vl"), "merger"),
}
"""Name of the projector, if it is not the usual one."""


@pytest.mark.parametrize("kind", WITH_TOWER_ADAPTERS if sampling.runs_all else ["gemma3", "idefics3", "qwen3_5"])
def test_adapters_of_tower_and_projector_share_a_batch(tmp_path: Path, kind: str) -> None:
    """LoRA everywhere, a whole projector beside LoRA of the language model, LoRA of the language model alone."""
    impl = "lorikeet" if kind in OWN else "transformers"
    projector = PROJECTORS.get(kind, "multi_modal_projector")
    asks: list[tuple[Request, Seen]] = []
    models: dict[str, PeftModel] = {}
    for name in ("everywhere", "projector", "language"):
        base = make_vision_base(tmp_path / name, kind)
        targets = everywhere(base) if name == "everywhere" else language_layers(base)
        more = {"modules_to_save": [projector]} if name == "projector" else {}
        models[name] = make_peft_adapter(base, tmp_path / f"{name}-adapter", target_modules=targets, **more)
        settings = settings_of(tmp_path / name, impl)
        geometry = load_rank(settings, tmp_path / name, SingleRankGroup()).geometry
        ref = reference(name, tmp_path / f"{name}-adapter", geometry)
        assert ref.changes_tower == (name != "language")
        seen = prompt_with(base, kind, (0, 1), 7)
        asks += [(asked(name, seen, ref, 3), seen), (asked(f"{name} base", seen, None, 3), seen)]
    most = sum(len(seen.token_ids) for _, seen in asks)
    settings = settings_of(tmp_path / "language", impl, max_num_batched_tokens=most)
    outcome = run(settings, [[each for each, _ in asks]])
    for each, seen in asks:
        assert worst(outcome, [(each, seen)], models[each.request_id.split()[0]]) < 1e-4
    # Two images by the base's tower, for all but two of the requests.
    assert outcome.images.computed == 2 * 3
    assert len({outcome.tokens[name][0].logprob for name in models}) == 3
