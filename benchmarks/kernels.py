"""Measures the kernels' time beside the machine's limits, and their accuracy: ``python -m benchmarks.kernels``.

The measurements run on the CPU, with the default model in bfloat16. Each part prints a table:

* ``steps``: a decode step of 32 sequences and a prefill, kernel by kernel, and decoding beside the machine's limit; a
  decode step of one sequence with the model's own GGUF file, beside reading it once.
* ``adapters``: time that adapters add to a decode step, beside the machine's minimum: the longer of reading each
  adapter once and multiplying its rows. Each step runs twice in a row, with the adapters and without.
* ``int8-adapters``: time that adapters kept in 8 bits add to a decode step, in turns with adapters in 16 bits, and each
  beside the machine's minimum.
* ``int8-errors``: changes of the log probabilities of a text's tokens, compared with float32, by adapters and KV in 8
  bits, and by bfloat16 alone, for the base and each sample adapter.
* ``kinds``: time that eight DoRA adapters, and eight adapters with norms or an output layer, add to a decode step of
  eight rows, in turns with eight plain adapters of the same rank.
* ``second-turn``: TTFT of a conversation's next turn under another adapter, after 2,000 tokens: an aLoRA, which shares
  the KV before its invocation with other adapters, in turns with the same matrices as an ordinary LoRA.
* ``throughput``: output tokens per second with adapters beside the base model's, in turns.
* ``ranks``: eight decodes of mixed ranks by the ``unpadded`` and the ``padded`` form, beside eight of one rank.
* ``loads``: an adapter of rank 64 a second over a link of 0.8 GB/s, and the steps beside it.
* ``quantised``: decoding and prefilling with weights in 8 and 4 bits, and with the model's own GGUF file, beside
  bfloat16, in turns.
* ``products``: products of all layers by number of rows, with weights in 8 and 4 bits beside bfloat16, in turns.
* ``errors``: the kernels' error on random values in units of torch's own in bfloat16, both beside fp64.
"""

import argparse
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.harness import (
    ROOT,
    THREADS,
    default_kernels,
    default_model,
    in_turns,
    kernels_as,
    make_requests,
    print_setup,
    print_table,
    ratios,
    replica,
    run_all,
    sample_adapters,
    with_interval,
)
from benchmarks.steps import AT_ONCE, KERNELS, LONGEST_TOKENS, Stopwatch, measure_loads, twins
from lorikeet.adapters.store import reference
from lorikeet.config import EngineSettings, ModelSettings, Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.clock import MonotonicClock
from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.ids import BlockId, RequestId
from lorikeet.core.plan import KernelForm, PromptToken
from lorikeet.core.request import Request, SamplingParams
from lorikeet.engine.build import Replica
from lorikeet.engine.driver import wait_for_work
from lorikeet.kernels import huge_pages
from lorikeet.kernels.interface import Kernels, Weight
from lorikeet.kernels.lora import LoraBatch, LoraDelta, LoraSegment, LoraTarget, LoraTargets, LoraWeights
from lorikeet.kernels.quantized import GROUP, QuantizedWeight, quantize, quantized_weight
from lorikeet.kernels.reference import ReferenceKernels
from lorikeet.memory.adapter_blocks import AdapterLayout
from lorikeet.memory.packing import AdapterPacking, pack
from lorikeet.models.config import read_model_config
from lorikeet.models.default import find_gguf
from lorikeet.models.model_folder import prepare_model
from lorikeet.profiling.machine_limits import (
    LimitMeter,
    MachineLimits,
    adapters_limit_s,
    decode_limit_tok_s,
    median_limits,
    model_cost,
)
from lorikeet.workloads.random_adapters import spread_ranks, write_random_adapter
from lorikeet.workloads.synthetic import ATTENTION

ROWS = 32
PROMPT_TOKENS = 160
OUTPUT_TOKENS = 64
"""Of the decode: around a context of 192."""
PREFILL = (16, 512)
ADAPTERS = 100
POINTS = ((1, 1), (1, 32), (8, 8), (32, 32), (100, 100))
"""Distinct adapters and rows of the steps that are timed with and without adapters."""
COUNTS = (8, 32, 100)
"""Distinct adapters, and rows, where adapters in 8 and in 16 bits are compared."""
TEXT_TOKENS = 1000
"""Of the README, whose log probabilities are compared."""
THROUGHPUT = ((1, 32, 128, 64), (8, 32, 128, 64), (32, 32, 128, 64), (100, 100, 32, 24))
"""Distinct adapters, requests, prompt and output tokens."""
EQUAL = (16,) * 8
LARGE = (64,) * 8
MIXED = (8,) * 6 + (16, 64)
"""Ranks of eight adapters. EQUAL and MIXED have the same sum, LARGE and MIXED the same maximum."""
COLD_BYTES = 512 * 2**20
"""At least so much is read before a batch's adapters are read again, many times the largest cache."""
BLOCK_TOKENS = 16
STD = 0.02
LOADED_RANK = 64
LINK_BYTES_PER_S = 0.8e9


def main() -> None:
    """Run the parts and print their tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--parts", default=",".join(PARTS), help="some of: " + ", ".join(PARTS))
    parser.add_argument("--rounds", type=int, default=5, help="of each side, in turns")
    options = parser.parse_args()
    print_setup()
    torch.set_num_threads(THREADS)
    for name in options.parts.split(","):
        PARTS[name](options.rounds)


# --- steps of the base model -------------------------------------------------------------------------


def steps(rounds: int) -> None:
    """Print steps kernel by kernel, and decoding beside the limit."""
    decode = kernel_times(ROWS, ROWS, PROMPT_TOKENS, OUTPUT_TOKENS)
    # A plan holds at most so many prompt tokens, and samples at its end.
    prefill = kernel_times(1, *PREFILL, 1)
    names = sorted(decode, key=lambda name: -decode[name])
    rows = [[name, *(f"{1e3 * times[name]:.3f}" for times in (decode, prefill))] for name in names]
    headings = ["kernel", f"decode of {ROWS}, ms", f"prefill of {PREFILL[1]} tokens, ms"]
    print_table("Steps, kernels called one by one", headings, rows)
    speeds, limits = decode_speeds(rounds)
    shares = ratios(speeds, limits)
    rows = [[f"{statistics.median(speeds):.0f}", f"{statistics.median(limits):.0f}", with_interval(shares, ".0%")]]
    print_table(f"Decoding {ROWS} sequences", ["tokens/s", "limit", "share of the limit"], rows)
    single = kernel_times(1, 1, PROMPT_TOKENS, OUTPUT_TOKENS, "gguf", AT_ONCE)
    single["reading the file once"] = find_gguf().stat().st_size / (LimitMeter(rows=()).measure().read_gb_s * 1e9)
    rows = [[name, f"{1e6 * seconds:.0f}"] for name, seconds in single.items() if seconds]
    print_table("A decode step of one sequence, GGUF", ["part", "us"], rows)


def kernel_times(
    rows: int,
    requests: int,
    prompt_tokens: int,
    output_tokens: int,
    quantization: str = "none",
    timed: Sequence[str] = KERNELS,
) -> dict[str, float]:
    """Return the median seconds of each kernel in a step that samples ``rows`` tokens."""
    watch = Stopwatch(default_kernels(), timed=timed)
    folder = prepare_model(ModelSettings(quantization=quantization), print).path
    by = replica(folder, quantization=quantization, threads=THREADS, touch_memory=True)
    with kernels_as(watch), by as built:
        for turn in range(2):  # the first run is a warm-up
            watch.steps.clear()
            run_all(built, make_requests(f"{turn}", requests, prompt_tokens, output_tokens, seed=turn))
        taken = watch.decode_steps(rows)
    found = {name: statistics.median(times.in_kernels_s.get(name, 0.0) for _, times in taken) for name in timed}
    found["outside of kernels"] = statistics.median(s - sum(times.in_kernels_s.values()) for s, times in taken)
    found["whole step"] = statistics.median(seconds for seconds, _ in taken)
    return found


def decode_speeds(rounds: int) -> tuple[list[float], list[float]]:
    """Return tokens per second of steps that decode all sequences, and the limit measured just before."""
    model = default_model()
    cost = model_cost(read_model_config(model), dtype_bytes=2)
    meter = LimitMeter(rows=(ROWS,))
    watch = Stopwatch(default_kernels())
    speeds = []
    limits = []
    with kernels_as(watch), replica(model, threads=THREADS, touch_memory=True) as built:
        for turn in range(rounds + 1):
            measured = meter.measure()
            watch.steps.clear()
            run_all(built, make_requests(f"{turn}", ROWS, PROMPT_TOKENS, OUTPUT_TOKENS, seed=turn))
            seconds = [seconds for seconds, _ in watch.decode_steps(ROWS)]
            if turn:
                speeds.append(ROWS * len(seconds) / sum(seconds))
                limits.append(decode_limit_tok_s(cost, measured, ROWS))
    return speeds, limits


# --- what adapters add -------------------------------------------------------------------------------


class Loaded:
    """Holds an engine with a hundred resident adapters. KV is not kept, so no adapter is evicted.

    Args:
        scratch: an empty folder, for the adapters.
        built: the engine.
    """

    def __init__(self, scratch: Path, built: Replica) -> None:
        self.built = built
        self.ranks = spread_ranks(ADAPTERS)
        geometry = built.sizes.geometry
        folders = [write_random_adapter(scratch / f"a{i}", geometry, r, seed=i) for i, r in enumerate(self.ranks)]
        self.refs = [reference(folder.name, folder, geometry) for folder in folders]
        run_all(built, make_requests("load", ADAPTERS, 4, 1, self.refs))

    def chosen(self, count: int) -> tuple[list[int], list[AdapterRef]]:
        """Return ranks and adapters, spread evenly over all ranks. A single adapter has rank 32."""
        places = [self.ranks.index(32)] if count == 1 else spread(ADAPTERS, count)
        return [self.ranks[i] for i in places], [self.refs[i] for i in places]


def spread(count: int, wanted: int) -> list[int]:
    """Return ``wanted`` evenly spread indices below ``count``. A single index is in the middle."""
    if wanted == 1:
        return [count // 2]
    return [round(i * (count - 1) / (wanted - 1)) for i in range(wanted)]


def with_loaded(run: Callable[[Loaded, int], None], rounds: int) -> None:
    """Run a part on an engine that holds all adapters."""
    with (
        tempfile.TemporaryDirectory(prefix="lorikeet-") as scratch,
        replica(
            default_model(), preset="lorikeet:plain-no-reuse", max_num_seqs=100, memory_bytes=3 * 2**30, threads=THREADS
        ) as built,
    ):
        run(Loaded(Path(scratch), built), rounds)


def adapters(loaded: Loaded, rounds: int) -> None:
    """Print the time that adapters add to a decode step."""
    config = read_model_config(default_model())
    meter = LimitMeter(rows=sorted({rows for _, rows in POINTS}))

    def point(distinct: int, rows: int) -> Callable[[int], tuple[float, float, float]]:
        def measure(turn: int) -> tuple[float, float, float]:
            ranks, refs = loaded.chosen(distinct)
            before = meter.measure()
            with twins(loaded.built) as executor:
                run_all(loaded.built, make_requests(f"a{turn}-{distinct}-{rows}", rows, 16, 17, refs))
            limits: MachineLimits = median_limits([before, meter.measure()])
            added_s = statistics.median(pair.adapters_s - pair.base_s for pair in executor.decodes)
            step_s = statistics.median(pair.adapters_s for pair in executor.decodes)
            return added_s, adapters_limit_s(model_cost(config, 2, ranks, ATTENTION), limits, rows), step_s

        return measure

    found = in_turns({f"{distinct} on {rows}": point(distinct, rows) for distinct, rows in POINTS}, rounds)
    table = []
    for name, times in found.items():
        added_s, least_s, step_s = (list(each) for each in zip(*times, strict=True))
        row = [f"{1e3 * statistics.median(each):.2f}" for each in (added_s, least_s)]
        table.append([name, *row, with_interval(ratios(added_s, least_s)), f"{1e3 * statistics.median(step_s):.1f}"])
    headings = ["adapters on rows", "added, ms", "limit, ms", "ratio", "whole step, ms"]
    print_table("What adapters add to a decode step", headings, table)


def int8_adapters(rounds: int) -> None:
    """Print the time that adapters in 16 and in 8 bits add to a decode step, and the loss in tokens/s."""
    config = read_model_config(default_model())
    meter = LimitMeter(rows=COUNTS)
    item_bytes = {"auto": 2, "int8": 1}
    with ExitStack() as stack:
        loaded = {form: stack.enter_context(_loaded_as(form)) for form in item_bytes}

        def side(form: str, count: int) -> Callable[[int], tuple[float, float, float]]:
            def measure(turn: int) -> tuple[float, float, float]:
                ranks, refs = loaded[form].chosen(count)
                before = meter.measure()
                with twins(loaded[form].built) as executor:
                    run_all(loaded[form].built, make_requests(f"{form}{turn}-{count}", count, 16, 17, refs))
                limits: MachineLimits = median_limits([before, meter.measure()])
                added_s = statistics.median(pair.adapters_s - pair.base_s for pair in executor.decodes)
                lost = statistics.median(1 - pair.base_s / pair.adapters_s for pair in executor.decodes)
                cost = model_cost(config, item_bytes[form], ranks, ATTENTION)
                return added_s, adapters_limit_s(cost, limits, count), lost

            return measure

        table = []
        for count in COUNTS:
            found = in_turns({form: side(form, count) for form in item_bytes}, rounds)
            added = {}
            row = [str(count)]
            for form, times in found.items():
                added_s, least_s, lost = (list(each) for each in zip(*times, strict=True))
                added[form] = added_s
                row += [f"{1e3 * statistics.median(added_s):.2f}", with_interval(ratios(added_s, least_s))]
                row.append(f"{statistics.median(lost):.1%}")
            table.append([*row, with_interval(ratios(added["int8"], added["auto"]))])
    of_form = ["added, ms", "to its limit", "tokens/s lost"]
    headings = [
        "adapters, a row each",
        *(f"{bits} bits: {name}" for bits in (16, 8) for name in of_form),
        "8 to 16 bits",
    ]
    print_table("What adapters in 16 and 8 bits add to a decode step", headings, table)


def int8_errors(_: int) -> None:
    """Print the changes of the README's log probabilities by 8 bits, beside the changes by bfloat16."""
    both = {"lora_dtype": "int8", "kv_cache_dtype": "int8"}
    forms: dict[str, tuple[str, dict[str, str]]] = {
        "bfloat16": ("bfloat16", {}),
        "adapters in 8 bits": ("bfloat16", {"lora_dtype": "int8"}),
        "KV in 8 bits": ("bfloat16", {"kv_cache_dtype": "int8"}),
        "both": ("bfloat16", both),
        "float32, both in 8 bits": ("float32", both),
    }
    exact = _log_probabilities("float32")
    table = []
    for form, (dtype, engine) in forms.items():
        found = _log_probabilities(dtype, **engine)
        for where, names in (("base", ["base"]), ("adapters", sorted(found.keys() - {"base"}))):
            pairs = [pair for name in names for pair in zip(found[name], exact[name], strict=True)]
            off = statistics.mean(abs(ours.logprob - true.logprob) for ours, true in pairs)
            loss = statistics.mean(true.logprob - ours.logprob for ours, true in pairs)
            same = statistics.mean((ours.rank == 1) == (true.rank == 1) for ours, true in pairs)
            table.append([form, where, f"{off:.4f}", f"{loss:+.4f}", f"{same:.1%}"])
    headings = ["form", "model", "mean difference", "loss", "as likely to be the likeliest"]
    print_table("Log probabilities of a text beside float32", headings, table)


def _log_probabilities(dtype: str, **engine: str) -> dict[str, list[PromptToken]]:
    """Return, for the base and each sample adapter, the log probability and the rank of each token of the README."""
    tokens = Tokenizer.from_file(str(default_model() / "tokenizer.json")).encode((ROOT / "README.md").read_text()).ids
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    found: dict[str, list[PromptToken]] = {}
    settings: dict[str, Any] = {"preset": "lorikeet:plain", "threads": THREADS, "memory_bytes": 2**29, **engine}
    with replica(default_model(), dtype, **settings) as built:
        for name, folder in {"base": None, **sample_adapters()}.items():
            ref = None if folder is None else reference(name, folder, built.sizes.geometry)
            built.engine.submit(Request(RequestId(name), tokens[:TEXT_TOKENS], sampling, 0.0, ref))
            found[name] = []
            while built.engine.has_requests:
                found[name] += [token for each in built.engine.step().prompt_logprobs for token in each.tokens]
                if not built.engine.is_busy and built.engine.has_requests:
                    wait_for_work(built.engine, MonotonicClock(), math.inf)
    return found


@contextmanager
def _loaded_as(form: str) -> Iterator[Loaded]:
    """Yield an engine that holds all adapters in the form of a ``lora_dtype``."""
    with (
        tempfile.TemporaryDirectory(prefix="lorikeet-") as scratch,
        replica(
            default_model(),
            preset="lorikeet:plain-no-reuse",
            max_num_seqs=100,
            memory_bytes=3 * 2**30,
            threads=THREADS,
            lora_dtype=form,
        ) as built,
    ):
        yield Loaded(Path(scratch), built)


def kinds(rounds: int) -> None:
    """Print the time that adapters of several kinds add to a decode step, beside plain adapters."""
    with (
        tempfile.TemporaryDirectory(prefix="lorikeet-") as scratch,
        replica(
            default_model(), preset="lorikeet:plain-no-reuse", max_num_seqs=8, memory_bytes=3 * 2**30, threads=THREADS
        ) as built,
    ):
        geometry = built.sizes.geometry

        def eight(kind: str) -> Callable[[int], float]:
            refs = []
            for number in range(8):
                folder = write_random_adapter(Path(scratch) / f"{kind}-{number}", geometry, 16, seed=number)
                _add_kind(folder, kind, geometry)
                refs.append(reference(folder.name, folder, geometry))
            run_all(built, make_requests(f"load {kind}", 8, 4, 1, refs))

            def measure(turn: int) -> float:
                with twins(built) as executor:
                    run_all(built, make_requests(f"{kind}{turn}", 8, 16, 17, refs))
                return statistics.median(pair.adapters_s - pair.base_s for pair in executor.decodes)

            return measure

        found = in_turns({kind: eight(kind) for kind in KINDS}, rounds)
    plain = found[KINDS[0]]
    table = [
        [kind, f"{1e3 * statistics.median(added_s):.2f}", with_interval(ratios(added_s, plain))]
        for kind, added_s in found.items()
    ]
    print_table(
        "What eight adapters of rank 16 add to a decode step of eight rows", ["kind", "added, ms", "ratio"], table
    )


def second_turn(rounds: int) -> None:
    """Print the TTFT of a second turn under another adapter than the first turn's."""
    with (
        tempfile.TemporaryDirectory(prefix="lorikeet-") as scratch,
        replica(default_model(), max_num_seqs=8, memory_bytes=2**30, threads=THREADS) as built,
    ):
        geometry = built.sizes.geometry
        folders = [write_random_adapter(Path(scratch) / f"a{i}", geometry, 16, seed=i) for i in range(2)]
        first, second = (reference(folder.name, folder, geometry) for folder in folders)
        run_all(built, make_requests("load", 2, 4, 1, [first, second]))

        def side(name: str, is_activated: bool) -> Callable[[int], float]:
            start = SHARED_TOKENS if is_activated else 0

            def ttft_s(turn: int) -> float:
                (long,) = make_requests(f"{name}{turn}", 1, SHARED_TOKENS + TURN_TOKENS, 1, [first], seed=turn)
                run_all(built, [msgspec.structs.replace(long, adapter_start=start)])
                (other,) = make_requests(f"{name}{turn}, next", 1, TURN_TOKENS, 1, [second], seed=rounds + turn)
                tokens = [*long.prompt_token_ids[:SHARED_TOKENS], *other.prompt_token_ids]
                began_s = time.monotonic()
                run_all(built, [msgspec.structs.replace(other, prompt_token_ids=tokens, adapter_start=start)])
                return time.monotonic() - began_s

            return ttft_s

        sides = {"LoRA": side("lora", False), "aLoRA": side("alora", True)}
        found = in_turns(sides, rounds)
    table = [
        [name, f"{1e3 * statistics.median(times):.1f}", with_interval(ratios(found["LoRA"], times))]
        for name, times in found.items()
    ]
    title = f"First token of a turn of {TURN_TOKENS} tokens under another adapter, after {SHARED_TOKENS} tokens"
    print_table(title, ["adapter", "TTFT, ms", "times shorter"], table)


KINDS = ("LoRA", "DoRA", "norms", "output layer")
SHARED_TOKENS = 2000
TURN_TOKENS = 32
"""Of a conversation, and of its second turn with the invocation."""


def _add_kind(folder: Path, kind: str, geometry: ModelGeometry) -> None:
    """Add the tensors of an adapter's kind, besides A and B, to the adapter."""
    file = folder / "adapter_model.safetensors"
    config_file = folder / "adapter_config.json"
    tensors = load_file(file)
    config = json.loads(config_file.read_text())
    base = geometry.replaceable
    assert base is not None
    prefix = "base_model.model.model."
    if kind == "DoRA":
        config["use_dora"] = True
        for name, value in list(tensors.items()):
            if "lora_B" in name:
                tensors[name.replace("lora_B.weight", "lora_magnitude_vector")] = torch.ones(len(value))
    elif kind == "norms":
        config["modules_to_save"] = ["input_layernorm", "post_attention_layernorm"]
        for layer in range(geometry.layers):
            for name in config["modules_to_save"]:
                tensors[f"{prefix}layers.{layer}.{name}.weight"] = torch.ones(geometry.hidden_size)
    elif kind == "output layer":
        config["modules_to_save"] = ["lm_head"]
        tensors["base_model.model.lm_head.weight"] = (
            torch.randn(base.vocab_size, geometry.hidden_size).bfloat16() * 0.02
        )
    save_file(tensors, file)
    config_file.write_text(json.dumps(config))


def throughput(loaded: Loaded, rounds: int) -> None:
    """Print output tokens per second with adapters beside the base model's."""
    table = []
    for distinct, requests, prompt_tokens, output_tokens in THROUGHPUT:
        sides = {"base": [], "adapters": loaded.chosen(distinct)[1]}

        def run(
            name: str, refs: list[AdapterRef], work: tuple[int, int, int] = (requests, prompt_tokens, output_tokens)
        ) -> Callable[[int], float]:
            def rate(turn: int) -> float:
                asked = make_requests(f"t{work[0]}-{len(refs)}-{name}-{turn}", *work, refs, seed=turn)
                began_s = time.monotonic()
                run_all(loaded.built, asked)
                return work[0] * work[2] / (time.monotonic() - began_s)

            return rate

        found = in_turns({name: run(name, refs) for name, refs in sides.items()}, rounds)
        lost = [1 - ratio for ratio in ratios(found["adapters"], found["base"])]
        speeds = [f"{statistics.median(found[name]):.0f}" for name in sides]
        table.append(
            [distinct, f"{requests} x ({prompt_tokens} + {output_tokens})", *speeds, with_interval(lost, ".1%")]
        )
    headings = ["distinct adapters", "work", "base, tokens/s", "with adapters", "lost"]
    print_table("Throughput with adapters", headings, table)


# --- forms of the LoRA kernel ------------------------------------------------------------------------


def ranks(rounds: int) -> None:
    """Print the time that LoRA adds to the linear layers of a step with mixed ranks. No weights are in a cache."""
    geometry = read_model_config(default_model()).geometry(2)
    kernels = default_kernels()
    kernels.threads = THREADS
    products = Products(kernels, geometry)
    batches = {
        "6 x 8, 16, 64: unpadded": _batches(MIXED, geometry, KernelForm.UNPADDED),
        "8 x 16": _batches(EQUAL, geometry, KernelForm.UNPADDED),
        "6 x 8, 16, 64: padded": _batches(MIXED, geometry, KernelForm.PADDED),
        "8 x 64": _batches(LARGE, geometry, KernelForm.UNPADDED),
    }

    def side(name: str) -> Callable[[int], float]:
        return lambda turn: statistics.median(
            products.added_s(batch, adapters_first=bool(i % 2)) for i, batch in enumerate(batches[name])
        )

    found = in_turns({name: side(name) for name in batches}, rounds)
    names = list(batches)
    beside = {names[0]: names[1], names[2]: names[3]}
    table = [
        [name, f"{1e3 * statistics.median(times):.2f}", with_interval(ratios(times, found[beside[name]])), beside[name]]
        if name in beside
        else [name, f"{1e3 * statistics.median(times):.2f}", "", ""]
        for name, times in found.items()
    ]
    print_table("Eight decodes, an adapter each", ["ranks", "added, ms", "ratio", "to"], table)


def _batches(ranks_: Sequence[int], geometry: ModelGeometry, form: KernelForm) -> list[LoraBatch]:
    """Return batches with a row for each rank and different adapters, which together have ``COLD_BYTES`` bytes."""
    one_bytes = sum(_pack(rank, geometry).used_elements for rank in ranks_) * geometry.dtype_bytes
    return [
        LoraBatch([LoraSegment(row, row + 1, _adapter(rank, geometry)) for row, rank in enumerate(ranks_)], form)
        for _ in range(-(-COLD_BYTES // one_bytes))
    ]


def _adapter(rank: int, geometry: ModelGeometry, as_: Callable[[Tensor], Tensor] = lambda it: it) -> LoraWeights:
    """Return random weights in scattered blocks of the pool's size, in huge pages as in the engine."""
    packing = _pack(rank, geometry)
    block_elements = geometry.block_elements(BLOCK_TOKENS)
    arena = huge_pages.allocate(packing.blocks * block_elements, torch.bfloat16)
    arena = as_(arena.normal_(std=STD, generator=torch.Generator().manual_seed(rank)))
    blocks = [BlockId(block) for block in random.Random(rank).sample(range(packing.blocks), packing.blocks)]
    return AdapterLayout(packing, geometry).weights(blocks, arena.view(packing.blocks, block_elements))


def _pack(rank: int, geometry: ModelGeometry) -> AdapterPacking:
    return pack(dict.fromkeys(ATTENTION, (rank,) * geometry.layers), geometry, geometry.block_elements(BLOCK_TOKENS))


class Products:
    """Holds the linear layers of a step that adapters change, with different random weights for every layer."""

    def __init__(self, kernels: Kernels, geometry: ModelGeometry) -> None:
        q, k, v, o = (geometry.modules[module] for module in ATTENTION)
        fused = q.out_features + k.out_features + v.out_features
        self._kernels = kernels
        self._layers = [
            tuple(kernels.pack(torch.empty(*shape, dtype=torch.bfloat16).normal_(std=STD)) for shape in shapes)
            for shapes in [((fused, q.in_features), (o.out_features, o.in_features))] * geometry.layers
        ]
        self._qkv = LoraTargets(
            LoraTarget("q", 0, q.out_features),
            LoraTarget("k", q.out_features, k.out_features),
            LoraTarget("v", q.out_features + k.out_features, v.out_features),
        )
        self._o = LoraTargets(LoraTarget("o", 0, o.out_features))
        self._inputs = q.in_features, o.in_features

    def added_s(self, batch: LoraBatch, *, adapters_first: bool) -> float:
        """Return the seconds that adapters add to the linear layers of a step."""
        seconds = {adapted: self._seconds(batch, adapted) for adapted in (adapters_first, not adapters_first)}
        return seconds[True] - seconds[False]

    def _seconds(self, batch: LoraBatch, adapted: bool) -> float:
        x, mixed = (torch.ones(len(batch.segments), inputs, dtype=torch.bfloat16) for inputs in self._inputs)
        began_s = time.perf_counter()
        for layer, (qkv, o) in enumerate(self._layers):
            self._kernels.linear(x, qkv, None, LoraDelta(batch, layer, self._qkv) if adapted else None)
            self._kernels.linear(mixed, o, None, LoraDelta(batch, layer, self._o) if adapted else None)
        return time.perf_counter() - began_s


# --- loads -------------------------------------------------------------------------------------------


def loads(rounds: int) -> None:
    """Print the time of an adapter load, and of decode steps during loads."""
    engine = EngineSettings(
        preset="lorikeet:plain-no-reuse",
        memory_bytes=300 * 2**20,
        host_memory_bytes=2**30,
        touch_memory=True,
        link_bytes_per_s=LINK_BYTES_PER_S,
        num_scheduler_steps=1,
        threads=THREADS,
    )
    model = default_model()
    geometry = read_model_config(model).geometry(2)
    with tempfile.TemporaryDirectory(prefix="lorikeet-") as scratch:
        folders = [
            write_random_adapter(Path(scratch) / f"a{i}", geometry, LOADED_RANK, seed=i) for i in range(4 * rounds + 1)
        ]
        refs = [reference(folder.name, folder, geometry) for folder in folders]
        settings = ModelSettings(model=str(model), dtype="bfloat16", max_model_len=LONGEST_TOKENS)
        found = measure_loads(Settings(settings, engine), refs)
    medians = [1e3 * statistics.median(times) for times in found]
    row = [*(f"{ms:.1f}" for ms in medians), f"{medians[1] / medians[2]:.2f}"]
    headings = ["a load, ms", "step beside one, ms", "other steps, ms", "ratio"]
    print_table(f"Loads of rank {LOADED_RANK}, one a second, beside 8 decodes", headings, [row])


# --- weights in 8 and 4 bits -------------------------------------------------------------------------

PRODUCT_ROWS = (1, 8, 32, 33, 64, 128, 256, 512)
"""Of a decode and of a prefill. Up to 32 are one block of the tile unit, which takes another path."""
QUANTISED = ("none", "int8", "int4", "gguf")
"""Values of ``--quantization``; the first is what the others are compared with."""


def quantised(rounds: int) -> None:
    """Print tokens per second by number of sequences and by form of the weights, and their ratio to bfloat16."""
    with ExitStack() as stack:
        sides = {name: stack.enter_context(timed_replica(name)) for name in QUANTISED}
        for title, rows, shape in (
            ("Decoding one sequence", 1, (1, PROMPT_TOKENS, OUTPUT_TOKENS)),
            (f"Decoding {ROWS} sequences", ROWS, (ROWS, PROMPT_TOKENS, OUTPUT_TOKENS)),
            (f"Prefilling prompts of {PREFILL[1]} tokens", 0, (*PREFILL, 1)),
        ):
            runs = {name: partial(tokens_per_s, *side, rows, shape) for name, side in sides.items()}
            speeds = in_turns(runs, rounds)
            base = speeds[QUANTISED[0]]
            table = [
                [
                    name.replace("none", "bfloat16"),
                    f"{statistics.median(found):.0f}",
                    with_interval(ratios(found, base)),
                ]
                for name, found in speeds.items()
            ]
            print_table(title, ["weights", "tokens/s", "of bfloat16"], table)


@contextmanager
def timed_replica(quantization: str) -> Iterator[tuple[Replica, Stopwatch]]:
    """Yield an engine with the default model in a form of ``--quantization``, and the times of its steps."""
    settings = ModelSettings(quantization=quantization)
    folder = prepare_model(settings, print).path
    watch = Stopwatch(default_kernels())
    # Four engines exist at the same time, each with only the memory that its sequences need.
    built_by = replica(folder, quantization=quantization, threads=THREADS, memory_bytes=2**29, host_memory_bytes=0)
    with kernels_as(watch), built_by as built:
        yield built, watch


def tokens_per_s(
    built: Replica,
    watch: Stopwatch,
    rows: int,
    shape: tuple[int, int, int],
    turn: int,
    refs: Sequence[AdapterRef] = (),
) -> float:
    """Return the tokens per second of the steps that decode ``rows`` sequences.

    For 0 rows, return the rate of prompt tokens from start to end.
    """
    watch.steps.clear()
    began_s = time.monotonic()
    run_all(built, make_requests(f"{turn}-{len(refs)}", *shape, refs, seed=turn))
    if not rows:
        return shape[0] * shape[1] / (time.monotonic() - began_s)
    seconds = [seconds for seconds, _ in watch.decode_steps(rows)]
    return rows * len(seconds) / sum(seconds)


def products(rounds: int) -> None:
    """Print seconds of the products of all layers by number of rows, and the speedup of packed weights."""
    config = read_model_config(default_model())
    kernels = default_kernels()
    query = config.heads * config.head_dim
    key_value = config.kv_heads * config.head_dim
    shapes = (
        (query + 2 * key_value, config.hidden_size),
        (config.hidden_size, query),
        (2 * config.intermediate_size, config.hidden_size),
        (config.hidden_size, config.intermediate_size),
    )
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator) * STD for shape in shapes]
    forms: dict[str, Callable[[Tensor], Tensor | QuantizedWeight]] = {
        "bfloat16": Tensor.bfloat16,
        "int8": partial(quantize, bits=8),
        "int4": partial(quantize, bits=4),
        "Q4_1": _q4_1,
    }
    # Each layer has different weights, so that no weights are in the second-level cache.
    packed = {
        name: [[kernels.pack(weight, torch.bfloat16) for weight in map(form, drawn)] for _ in range(config.layers)]
        for name, form in forms.items()
    }
    table = []
    for rows in PRODUCT_ROWS:
        inputs = [torch.randn(rows, weight.shape[1], generator=generator).bfloat16() for weight in drawn]

        def measure(layers: Sequence[Sequence[Weight]], turn: int, inputs: Sequence[Tensor] = inputs) -> float:
            began_s = time.perf_counter()
            for layer in layers:
                for x, weight in zip(inputs, layer, strict=True):
                    kernels.linear(x, weight, None)
            return time.perf_counter() - began_s

        found = in_turns({name: partial(measure, layers) for name, layers in packed.items()}, 4 * rounds)
        base = found["bfloat16"]
        compared = [with_interval(ratios(base, found[name])) for name in list(forms)[1:]]
        table.append([rows, f"{1e3 * statistics.median(base):.2f}", *compared])
    headings = ["rows", "bfloat16, ms", *(f"{name}, times as fast" for name in list(forms)[1:])]
    print_table(f"Products of {config.layers} layers, {kernels.threads} threads", headings, table)


def _q4_1(weight: Tensor) -> QuantizedWeight:
    """Return a weight of 4 bits with an offset for each group, as GGUF's Q4_1 has."""
    symmetric = quantize(weight, bits=4)
    scales = symmetric.scales.float()
    return quantized_weight(symmetric.levels(), scales, -symmetric.zero * scales, bits=4, group=GROUP)


# --- errors ------------------------------------------------------------------------------------------


def errors(rounds: int) -> None:
    """Print root mean square errors beside torch's, by kernel and number of rows."""
    kernels = default_kernels()
    plain = ReferenceKernels()
    config = read_model_config(default_model())
    width = config.hidden_size
    inner = config.intermediate_size
    geometry = config.geometry(2)
    targets = LoraTargets(LoraTarget("q", 0, width))
    table = []
    for rows in (1, 8, 32, 512):
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, width, generator=generator).bfloat16()
        query = torch.randn(width, width, generator=generator).bfloat16() / width**0.5
        weight = (torch.randn(inner, width, generator=generator) / width**0.5).bfloat16()
        norm = torch.rand(width, generator=generator).bfloat16()
        gated = torch.randn(rows, 2 * inner, generator=generator).bfloat16()
        residual = torch.randn(rows, width, generator=generator).bfloat16()
        cases: dict[str, Callable[[Kernels, Callable[[Tensor], Tensor]], Tensor]] = {
            "linear": lambda k, as_: k.linear(as_(x), k.pack(as_(weight)), None, None),  # noqa: B023
            "add_norm": lambda k, as_: k.add_norm(as_(x), as_(residual), as_(norm), 1e-5),  # noqa: B023
            "linear with LoRA": lambda k, as_: k.linear(
                as_(x),  # noqa: B023
                k.pack(as_(query)),  # noqa: B023
                None,
                LoraDelta(LoraBatch([LoraSegment(0, rows, _adapter(64, geometry, as_))]), 0, targets),  # noqa: B023
            ),
            "silu_mul": lambda k, as_: k.silu_mul(as_(gated)),  # noqa: B023
        }
        for name, case in cases.items():
            exact = case(plain, Tensor.double)
            ours, torchs = (_rms(case(each, Tensor.clone).double() - exact) for each in (kernels, plain))
            table.append([name, rows, f"{ours:.2e}", f"{torchs:.2e}", f"{ours / torchs:.2f}"])
    headings = ["kernel", "rows", f"error of {kernels.name!r}", "of torch", "ratio"]
    print_table("Errors in bfloat16 beside fp64, root mean square", headings, table)


def _rms(error: Tensor) -> float:
    return float(error.square().mean().sqrt())


PARTS: dict[str, Callable[[int], None]] = {
    "steps": steps,
    "adapters": lambda rounds: with_loaded(adapters, rounds),
    "int8-adapters": int8_adapters,
    "int8-errors": int8_errors,
    "kinds": kinds,
    "second-turn": second_turn,
    "throughput": lambda rounds: with_loaded(throughput, rounds),
    "ranks": ranks,
    "loads": loads,
    "quantised": quantised,
    "products": products,
    "errors": errors,
}


if __name__ == "__main__":
    main()
