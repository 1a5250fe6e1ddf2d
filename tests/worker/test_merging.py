"""Merged weights are computed from pristine ones in place and restored exactly; tokens do not change."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from lorikeet.core.executor import ExecutorError
from lorikeet.core.geometry import LORA_MODULES, PRODUCTS, ModelGeometry
from lorikeet.core.ids import AdapterDigest
from lorikeet.core.plan import StepPlan
from lorikeet.kernels.backends import choose_kernels
from lorikeet.kernels.interface import Kernels, Weight
from lorikeet.kernels.lora import LoraBatch, LoraSegment, LoraWeights
from lorikeet.kernels.native import PanelWeight
from lorikeet.models.config import ModelConfig, read_model_config
from lorikeet.models.decoder import Decoder
from lorikeet.models.loading import load_weights
from lorikeet.models.parallel import SingleRankGroup
from lorikeet.models.weights import DecoderWeights, pack_weights
from lorikeet.policies import BATCHING
from lorikeet.presets import PRESETS, MergeBy
from lorikeet.worker.merging import Merger
from tests.models.arenas import Arena
from tests.models.checkpoints import make_checkpoint
from tests.support.driver import Driver, Models, driving, make_models, peer_tokens, random_tokens

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
ATTENTION = ("q", "k", "v", "o")
backends = pytest.mark.parametrize("backend", ["reference", "native"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


class Rig(NamedTuple):
    """A model whose weights are merged, and adapters for it.

    Attributes:
        plain: the weights as they were loaded, never changed.
        packed: those that are merged.
    """

    merger: Merger
    plain: DecoderWeights
    packed: DecoderWeights
    kernels: Kernels
    config: ModelConfig
    adapters: dict[str, LoraWeights]

    def switch(self, name: str | None) -> None:
        """Merge an adapter, or none."""
        if name is None:
            self.merger.switch(None, None)
        else:
            self.merger.switch(AdapterDigest(name), self.adapters[name])

    def elements(self) -> dict[tuple[int, str], Tensor]:
        """Every linear weight as it lies in memory."""
        found = {
            (layer, product): memory(getattr(weights, product))
            for layer, weights in enumerate(self.packed.layers)
            for product in PRODUCTS
        }
        return found | {(len(self.packed.layers), "lm_head"): memory(self.packed.lm_head)}

    def copies(self) -> dict[tuple[int, str], Tensor]:
        """The same, copied."""
        return {place: elements.clone() for place, elements in self.elements().items()}


def memory(weight: Weight) -> Tensor:
    if isinstance(weight, Tensor):
        return weight
    assert isinstance(weight, PanelWeight)
    return weight.panels


def make_adapter(
    geometry: ModelGeometry, dtype: torch.dtype, seed: int, ranks: dict[str, int], layers: tuple[int, ...] = (0, 1, 2)
) -> LoraWeights:
    """Return random weights; those of a rank above 3 come in two pieces."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * 0.2).to(dtype)

    pieces = {}
    for layer in layers:
        for module, rank in ranks.items():
            shape = geometry.modules[module]
            cut = [3, rank - 3] if rank > 3 else [rank]
            a = draw(rank, shape.in_features)
            bt = draw(rank, shape.out_features)
            pieces[layer, module] = tuple(zip(a.split(cut), bt.split(cut), strict=True))
    return LoraWeights(pieces, geometry.layers)


def make_rig(folder: Path, backend: str, dtype: torch.dtype, merge_by: MergeBy = MergeBy.DELTA) -> Rig:
    config = read_model_config(folder)
    geometry = config.geometry(dtype.itemsize)
    kernels = choose_kernels(backend, dtype, CPU)
    loaded = load_weights(folder, config, dtype)
    packed = pack_weights(loaded, kernels, keep_plain=True)
    merger = Merger(loaded, packed, kernels, geometry, merge_by, CPU)
    adapters = {
        "narrow": make_adapter(geometry, dtype, 1, {"q": 2, "v": 3}),
        "attention": make_adapter(geometry, dtype, 2, dict.fromkeys(ATTENTION, 8)),
        "one-layer": make_adapter(geometry, dtype, 3, {"gate": 4, "down": 1}, layers=(1,)),
        "wide": make_adapter(geometry, dtype, 4, dict.fromkeys(LORA_MODULES, 24), layers=(0, 2)),
    }
    return Rig(merger, load_weights(folder, config, dtype), packed, kernels, config, adapters)


def touched(adapter: LoraWeights) -> set[tuple[int, str]]:
    return {
        (layer, product)
        for layer, module in adapter.pieces
        for product, modules in PRODUCTS.items()
        if module in modules
    }


def with_adapter(plain: Tensor, layer: int, product: str, adapter: LoraWeights) -> Tensor:
    """Return one weight with an adapter in it, in fp64."""
    exact = plain.double()
    parts = exact.split({"qkv": [48, 24, 24], "gate_up": [80, 80]}.get(product, [len(exact)]))
    for module, part in zip(PRODUCTS[product], parts, strict=True):
        for a, bt in adapter.pieces.get((layer, module), ()):
            part += bt.double().T @ a.double()
    return exact


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def folder(models: Models) -> Path:
    return models.folder


@pytest.fixture
def driver(models: Models) -> Iterator[Driver]:
    with driving(models.folder, preset="dlora") as made:
        made.load(*models.adapters.values())
        yield made


@backends
@dtypes
@pytest.mark.parametrize("merge_by", MergeBy)
def test_pristine_weights_keep_bits_and_addresses_after_random_switches(
    folder: Path, backend: str, dtype: torch.dtype, merge_by: MergeBy
) -> None:
    rig = make_rig(folder, backend, dtype, merge_by)
    start = rig.copies()
    addresses = {place: elements.data_ptr() for place, elements in rig.elements().items()}
    order = random.Random(1)
    for _ in range(60):
        name = order.choice([None, *rig.adapters])
        rig.switch(name)
        assert rig.merger.merged == name
        changed = set() if name is None else touched(rig.adapters[name])
        found = rig.elements()
        assert {place for place in start if not torch.equal(start[place], found[place])} == changed
    rig.switch(None)
    found = rig.elements()
    assert all(torch.equal(start[place], found[place]) for place in start)
    assert {place: elements.data_ptr() for place, elements in found.items()} == addresses


@backends
@dtypes
def test_merged_weights_do_not_depend_on_earlier_merges(folder: Path, backend: str, dtype: torch.dtype) -> None:
    rig = make_rig(folder, backend, dtype)
    rig.switch("wide")
    alone = rig.copies()
    for before in ("narrow", "one-layer", "attention"):
        rig.switch(before)
        rig.switch("wide")
        found = rig.elements()
        assert all(torch.equal(alone[place], found[place]) for place in alone)


@dtypes
@pytest.mark.parametrize("name", ["narrow", "attention", "one-layer", "wide"])
def test_a_merged_weight_is_the_exact_sum_rounded_once(folder: Path, dtype: torch.dtype, name: str) -> None:
    rig = make_rig(folder, "reference", dtype)
    rig.switch(name)
    # Half a unit in the last place, and what sums in fp32 are off.
    bound = {"rtol": torch.finfo(dtype).eps / 2 + 1e-6, "atol": 1e-6}
    for layer, (plain, merged) in enumerate(zip(rig.plain.layers, rig.packed.layers, strict=True)):
        for product in PRODUCTS:
            exact = with_adapter(getattr(plain, product), layer, product, rig.adapters[name])
            torch.testing.assert_close(getattr(merged, product).double(), exact, **bound)


@backends
def test_a_merged_forward_gives_the_logits_of_an_unmerged_one(folder: Path, backend: str) -> None:
    rig = make_rig(folder, backend, torch.float32)
    decoder = Decoder(rig.config, rig.packed, rig.kernels, SingleRankGroup())
    prompt = random_tokens(12, seed=5)
    for name, adapter in rig.adapters.items():
        arena = Arena.make(rig.config, decoder)
        lora = LoraBatch([LoraSegment(0, len(prompt), adapter)])
        rig.switch(None)
        base = decoder.forward(arena.batch([("base", prompt)]), arena.kv)
        unmerged = decoder.forward(arena.batch([("unmerged", prompt)], lora), arena.kv)
        rig.switch(name)
        merged = decoder.forward(arena.batch([("merged", prompt)]), arena.kv)
        torch.testing.assert_close(merged, unmerged, atol=1e-4, rtol=0)
        assert (merged - base).abs().max() > 0.1


@backends
@pytest.mark.parametrize("merge_by", MergeBy)
def test_a_switch_writes_changed_weights_or_the_whole_model(folder: Path, backend: str, merge_by: MergeBy) -> None:
    rig = make_rig(folder, backend, torch.float32, merge_by)
    rig.switch("one-layer")
    for elements in rig.elements().values():
        elements.fill_(7.0)
    rig.switch("narrow")
    left = {place for place, elements in rig.elements().items() if bool((elements == 7.0).all())}
    written = touched(rig.adapters["narrow"]) | touched(rig.adapters["one-layer"])
    assert left == (rig.elements().keys() - written if merge_by is MergeBy.DELTA else set())


@backends
def test_a_merged_adapter_is_not_needed_any_more(folder: Path, backend: str) -> None:
    rig = make_rig(folder, backend, torch.float32)
    start = rig.copies()
    rig.switch("attention")
    merged = rig.copies()
    for pieces in rig.adapters["attention"].pieces.values():
        for a, bt in pieces:
            a.fill_(float("nan"))
            bt.fill_(float("nan"))
    assert all(torch.equal(merged[place], elements) for place, elements in rig.elements().items())
    rig.switch(None)
    assert all(torch.equal(start[place], elements) for place, elements in rig.elements().items())


def test_a_tied_output_layer_is_swapped_and_the_embedding_stays(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama-tied")
    rig = make_rig(tmp_path, "native", torch.float32, MergeBy.MODEL)
    start = rig.copies()
    embedding = rig.packed.embedding.clone()
    for name in ("wide", None):
        rig.switch(name)
        found = rig.elements()[3, "lm_head"]
        assert torch.equal(found, start[3, "lm_head"])
        found.fill_(7.0)
    assert torch.equal(rig.packed.embedding, embedding)


def test_only_presets_that_can_merge_keep_unmerged_weights() -> None:
    merging = {name for name, preset in PRESETS.items() if BATCHING.load(preset.batching).merges}
    assert {"dlora", "merged-only", "dlora:vllm-uniform"} <= merging
    assert not merging & {"lorikeet:plain", "unmerged-only", "dlora:peft", "dlora:s-lora", "chameleon", "toppings"}


# --- plans -------------------------------------------------------------------------------------------


def run_randomly(driver: Driver, models: Models) -> None:
    """Give every adapter and the base two sequences; merge adapters at random, and check all tokens."""
    prompts = {}
    for name in ("base", *models.adapters):
        for number in range(2):
            prompt = prompts[f"{name}-{number}"] = random_tokens(7 + number, seed=len(name) + number)
            driver.add(f"{name}-{number}", prompt, models.adapters.get(name))
    order = random.Random(3)
    left = {name: len(prompt) for name, prompt in prompts.items()}
    switches = 0.0
    for _ in range(60):
        merged = order.choice([None, None, *models.adapters])
        able = [name for name in prompts if merged is None or name.startswith(merged)]
        chosen = order.sample(able, order.randint(1, len(able)))
        # A prompt is cut in two, so that its KV is written under several mixtures.
        work = {name: max(1, -(-left[name] // 2)) for name in chosen}
        repeat = 2 if all(left[name] == 0 for name in chosen) else 1
        result = driver.step(work, repeat, merged=None if merged is None else models.adapters[merged])
        assert result.duration_s >= result.switch_s >= 0.0
        switches += result.switch_s > 0.0
        for name in chosen:
            left[name] = max(0, left[name] - work[name])
    assert switches > 10
    for name, prompt in prompts.items():
        found = driver.token_ids(name)
        assert len(found) > 3, name
        assert found == peer_tokens(models.folder, models.adapters.get(name[:-2]), prompt, len(found)), name


def test_tokens_are_the_same_whether_and_when_an_adapter_is_merged(models: Models, driver: Driver) -> None:
    run_randomly(driver, models)


def test_ranks_merge_their_shares(models: Models) -> None:
    with driving(models.folder, tensor_parallel=2, preset="dlora") as driver:
        driver.load(*models.adapters.values())
        run_randomly(driver, models)


def test_models_that_are_swapped_whole_give_the_same_tokens(models: Models) -> None:
    with driving(models.folder, preset="dlora:vllm-uniform", kernels="reference") as driver:
        driver.load(*models.adapters.values())
        run_randomly(driver, models)


def test_an_evicted_adapter_stays_merged_until_another_takes_its_place(models: Models, driver: Driver) -> None:
    wide = models.adapters["wide"]
    narrow = models.adapters["narrow"]
    prompts = {name: random_tokens(6, seed=len(name)) for name in ("wide", "narrow", "base")}
    for name, prompt in prompts.items():
        driver.add(name, prompt, models.adapters.get(name))
    assert driver.step({"wide": 6}, merged=wide).switch_s > 0.0
    # A plan without sequences asks for no switch, whatever it says.
    assert driver.execute(StepPlan(1, evictions=(wide.digest,))).switch_s == 0.0
    driver.step({"wide": 1}, repeat=4, merged=wide)
    assert driver.step({"wide": 1}, merged=wide).switch_s == 0.0
    assert driver.step({"narrow": 6}, merged=narrow).switch_s > 0.0
    driver.step({"narrow": 1, "base": 6})
    driver.decode(["narrow", "base"], 4)
    for name, prompt in prompts.items():
        found = driver.token_ids(name)
        assert found == peer_tokens(models.folder, models.adapters.get(name), prompt, len(found)), name
    with pytest.raises(ExecutorError, match="is not loaded"):
        driver.step({"wide": 1}, merged=wide)


@pytest.mark.parametrize("other", ["narrow", "base"])
def test_others_cannot_run_while_an_adapter_is_merged(models: Models, driver: Driver, other: str) -> None:
    wide = models.adapters["wide"]
    driver.add("wide", random_tokens(6, seed=1), wide)
    driver.add("other", random_tokens(6, seed=2), models.adapters.get(other))
    with pytest.raises(ExecutorError, match=r"only adapter .* can run while it is merged"):
        driver.step({"wide": 6, "other": 6}, merged=wide)


def test_rows_that_never_merge_refuse_to(models: Models) -> None:
    wide = models.adapters["wide"]
    with driving(models.folder) as driver:
        driver.load(wide)
        driver.add("wide", random_tokens(6, seed=1), wide)
        with pytest.raises(ExecutorError, match="this preset never merges"):
            driver.step({"wide": 6}, merged=wide)
