"""Compares the tokens per second of Lorikeet and its peers: ``python -m benchmarks.peers``.

All sides get the same requests together and run in turns, in one dtype, on the same cores. The machine's limit is
measured in the same minutes. ``benchmarks.offline`` runs one such comparison with any numbers; this program runs the
comparisons that docs/performance.md shows.

Peers: ``peft`` (transformers with PEFT, from the extra ``peers``), ``vllm`` and ``vllm-base`` (vLLM's CPU build with
and without adapters, from ``python -m benchmarks.environments vllm``), ``llama.cpp`` (``llama-batched-bench`` on the
path or by ``--llama-bench``; base model only, in bfloat16). Peers that are not installed are left out, and the program
names them.

``--quantised`` instead decodes 1, 8 and 32 sequences with weights in bfloat16, in 8 and in 4 bits, with the model's own
4-bit GGUF file, and with llama.cpp on that file (``llama-cpp-python``, built for this processor by ``python -m
benchmarks.environments llama-cpp-python``, or ``--llama-python``): all in turns, beside what the machine allows.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, NamedTuple

from benchmarks.environments import llama_cpp_python
from benchmarks.harness import (
    ROOT,
    THREADS,
    default_model,
    in_turns,
    make_requests,
    print_setup,
    print_table,
    ratios,
    run_all,
    with_interval,
)
from benchmarks.kernels import OUTPUT_TOKENS, PROMPT_TOKENS, QUANTISED, timed_replica, tokens_per_s
from benchmarks.offline_bench import OfflineOptions, run_offline
from benchmarks.steps import Stopwatch
from benchmarks.vllm_backend import DEFAULT_PYTHON
from lorikeet.adapters.store import reference
from lorikeet.core.adapter import AdapterRef
from lorikeet.engine.build import Replica
from lorikeet.models.config import ModelConfig, read_model_config
from lorikeet.models.default import find_gguf
from lorikeet.profiling.machine_limits import LimitMeter, MachineLimits, model_cost
from lorikeet.workloads.random_adapters import write_random_adapter

LLAMA_CPP = "llama.cpp"
VLLM = ("vllm", "vllm-base")
PEERS = ("peft", *VLLM, LLAMA_CPP)


class Comparison(NamedTuple):
    """Describes the work on which sides are compared.

    Attributes:
        name: name of the work.
        requests, prompt_tokens, output_tokens: number and lengths of the requests, which arrive together.
        adapters: number of adapters; 0 for the base model.
        rank: rank of the adapters; 0 for ranks from 8 to 128.
        peers: peers that can run the work.
        is_prefill: whether prompt tokens also count.
    """

    name: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    adapters: int
    rank: int
    peers: tuple[str, ...]
    is_prefill: bool = False


COMPARISONS = (
    Comparison("1 stream, 32 + 64, one adapter of rank 32", 1, 32, 64, 1, 32, ("peft", "vllm")),
    Comparison("32 x (128 + 64), 8 adapters of ranks 8 to 128", 32, 128, 64, 8, 0, ("peft", "vllm-base")),
    Comparison("32 x (128 + 64), base model", 32, 128, 64, 0, 0, ("peft", "vllm", LLAMA_CPP)),
    Comparison("prefill of 16 x 512, base model", 16, 512, 1, 0, 0, ("vllm", LLAMA_CPP), is_prefill=True),
)


def main() -> None:
    """Run the comparisons and print one table each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--peers", default=",".join(PEERS), help="some of: " + ", ".join(PEERS))
    parser.add_argument("--pairs", type=int, default=5, help="timed runs of each side, in turns")
    parser.add_argument("--only", type=int, help="run the comparison of this number, from 1, alone")
    parser.add_argument("--llama-bench", default=shutil.which("llama-batched-bench") or "", help="its program")
    parser.add_argument("--quantised", action="store_true", help="weights in 8 and 4 bits beside llama.cpp, only")
    parser.add_argument("--llama-python", help="of an environment with llama-cpp-python and gguf")
    parser.add_argument("--sequences", default="1,8,32", help="with --quantised: how many are decoded at a time")
    options = parser.parse_args()
    print_setup()
    if options.quantised:
        python = Path(options.llama_python) if options.llama_python else llama_cpp_python()
        compare_quantised(python, [int(text) for text in options.sequences.split(",")], options.pairs)
        return
    wanted = available(options.peers.split(","), options.llama_bench)
    chosen = COMPARISONS if options.only is None else COMPARISONS[options.only - 1 : options.only]
    for work in chosen:
        compare(work, [peer for peer in work.peers if peer in wanted], options.pairs, options.llama_bench)


def available(peers: Sequence[str], llama_bench: str) -> list[str]:
    """Return the peers that can run on this machine, and print the reasons why others cannot.

    Raises:
        SystemExit: a peer is unknown.
    """
    if unknown := set(peers) - set(PEERS):
        raise SystemExit(f"unknown peers: {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    reasons = {LLAMA_CPP: "" if llama_bench else "llama-batched-bench is not on the path"}
    reasons["peft"] = "" if find_spec("peft") else "PEFT is not installed (extra `peers`)"
    for name in VLLM:
        reasons[name] = "" if DEFAULT_PYTHON.is_file() else "python -m benchmarks.environments vllm has not been run"
    for name in peers:
        if reasons[name]:
            print(f"left out: {name}, {reasons[name]}")
    return [name for name in peers if not reasons[name]]


def compare(work: Comparison, peers: Sequence[str], pairs: int, llama_bench: str) -> None:
    """Run one comparison and print it."""
    offline = OfflineOptions(
        model=str(default_model()),
        requests=work.requests,
        prompt_tokens=work.prompt_tokens,
        output_tokens=work.output_tokens,
        adapters=work.adapters,
        adapter_rank=work.rank,
        peers=tuple(peer for peer in peers if peer != LLAMA_CPP),
        pairs=pairs,
        threads=THREADS,
    )
    report = run_offline(offline)
    unit = "total" if work.is_prefill else "output"
    key = f"{unit}_tok_s"
    limit = report[f"limit_{key}"]
    rows = [["lorikeet", f"{report[key]:.0f}", "", f"{report[key] / limit:.0%}", ""]]
    for name, peer in report["peers"].items():
        low, high = peer["ratio_interval"]
        faster = f"{peer['ratio']:.2f} ({low:.2f} to {high:.2f})"
        same = f"{peer['first_tokens_equal']:.0%}"
        rows.append([name, f"{peer[key]:.0f}", faster, f"{peer[key] / limit:.0%}", same])
    if LLAMA_CPP in peers:
        tok_s = llama_cpp_tok_s(llama_bench, work, pairs)
        rows.append([f"{LLAMA_CPP} (after the others)", f"{tok_s:.0f}", f"{report[key] / tok_s:.2f}", "", ""])
    rows.append(["limit of the machine", f"{limit:.0f}", "", "", ""])
    headings = ["side", f"{unit} tokens/s", "Lorikeet is x times as fast", "of the limit", "same first tokens"]
    print_table(work.name, headings, rows)
    versions = ", ".join(f"{name} {text}" for name, text in report["versions"].items())
    print(f"  {pairs} pairs, {THREADS} threads, bfloat16; {versions}\n")


def llama_cpp_tok_s(program: str, work: Comparison, runs: int) -> float:
    """Return the median tokens per second of llama.cpp on the base model, in bfloat16.

    Its benchmark computes all prompts as one batch and then decodes them together, which is the same work. It is a
    separate process, so it cannot run in turns and runs last.
    """
    speeds = []
    with tempfile.TemporaryDirectory(prefix="lorikeet-llama-") as scratch:
        file = write_bf16_gguf(Path(scratch) / "model.gguf")
        context = work.requests * (work.prompt_tokens + work.output_tokens)
        command = [program, "-m", str(file), "-c", str(context), "-b", "2048", "-ub", "512", "-t", str(THREADS)]
        command += ["-npp", str(work.prompt_tokens), "-ntg", str(work.output_tokens), "-npl", str(work.requests)]
        for _ in range(runs):
            asked = subprocess.run([*command, "--output-format", "jsonl"], capture_output=True, text=True, check=True)
            speeds.append(_speed(asked.stdout, work))
    return sorted(speeds)[len(speeds) // 2]


def _speed(output: str, work: Comparison) -> float:
    """Return tokens per second from the line of JSON that ``llama-batched-bench`` prints."""
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    seconds = float(rows[-1]["t"])
    tokens = work.output_tokens + (work.prompt_tokens if work.is_prefill else 0)
    return work.requests * tokens / seconds


def write_bf16_gguf(path: Path) -> Path:
    """Write the default model's GGUF with its matrices in bfloat16 instead of four bits, and return the path."""
    import gguf
    import numpy as np
    from gguf import GGMLQuantizationType as Kind

    reader = gguf.GGUFReader(find_gguf())
    writer = gguf.GGUFWriter(path, arch=str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind = field.types[0]
        inner = field.types[-1]
        value: Any = field.contents()
        if name == "general.file_type":
            value = int(gguf.LlamaFileType.MOSTLY_BF16)
        writer.add_key_value(name, value, kind, sub_type=inner if kind == gguf.GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, gguf.quantize(values, Kind.BF16), raw_dtype=Kind.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# --- weights in 8 and 4 bits --------------------------------------------------------------------------

BITS = {"none": (16.0, 16.0), "int8": (8.5, 8.5), "int4": (4.5, 8.5)}
"""Of a weight of a layer and of the output layer, scales included."""

ADAPTER_RANK = 32
"""Of the adapter on attention that one sequence is decoded with, too."""


def compare_quantised(python: Path, sequences: Sequence[int], rounds: int) -> None:
    """Print tokens per second of decode steps by form of the weights, beside bfloat16, llama.cpp and the limit."""
    model = default_model()
    meter = LimitMeter(rows=sorted({1, *sequences}))  # the adapter's folder contains the tokenizer
    config = read_model_config(model)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lorikeet-")))
        engines = {name: stack.enter_context(timed_replica(name)) for name in QUANTISED}
        geometry = engines["gguf"][0].sizes.geometry
        folder = write_random_adapter(scratch / "adapter", geometry, ADAPTER_RANK, seed=0)
        refs = [reference("adapter", folder, geometry)]
        run_all(engines["gguf"][0], make_requests("load", 1, 4, 1, refs))
        ask, version = stack.enter_context(_llama_cpp(python, folder))
        for rows, adapted in [(rows, False) for rows in sequences] + [(1, True)]:
            shape = rows, PROMPT_TOKENS, OUTPUT_TOKENS
            sides: dict[str, Callable[[int], float]] = {
                name: partial(_rate, *engine, shape, refs if adapted else ())
                for name, engine in engines.items()
                if name == "gguf" or not adapted
            }
            sides[LLAMA_CPP] = partial(ask, *shape, adapted)
            limits = _Limits(meter)
            found = in_turns({"limit": limits.measure, **sides}, rounds)
            table = []
            for name in sides:
                speeds = found[name]
                least = [_least_s(name, config, each, rows) for each in limits.found[-rounds:]]
                share = statistics.median(speed * s / rows for speed, s in zip(speeds, least, strict=True))
                row = [name.replace("none", "bfloat16"), f"{statistics.median(speeds):.0f}"]
                row += ["" if adapted else with_interval(ratios(speeds, found["none"]))]
                row += [with_interval(ratios(speeds, found[LLAMA_CPP])), f"{share:.0%}"]
                table.append(row)
            what = f"{rows} sequence{'s' if rows > 1 else ''}" + (f", adapter of rank {ADAPTER_RANK}" * adapted)
            headings = ["weights", "tokens/s", "of bfloat16", f"of {LLAMA_CPP}", "of the limit"]
            print_table(f"Decoding {what} around a context of {PROMPT_TOKENS + OUTPUT_TOKENS // 2}", headings, table)
    print(f"  {rounds} rounds, {THREADS} threads; llama-cpp-python {version} on the same GGUF file as gguf\n")


class _Limits:
    """Measures the machine's rates as a side of a comparison."""

    def __init__(self, meter: LimitMeter) -> None:
        self.found: list[MachineLimits] = []
        self._meter = meter

    def measure(self, turn: int) -> float:
        """Measure the rates now, and keep the result in ``found``."""
        self.found.append(self._meter.measure())
        return self.found[-1].read_gb_s


def _rate(
    built: Replica, watch: Stopwatch, shape: tuple[int, int, int], refs: Sequence[AdapterRef], turn: int
) -> float:
    return tokens_per_s(built, watch, shape[0], shape, turn, refs)


def _least_s(name: str, config: ModelConfig, limits: MachineLimits, rows: int) -> float:
    """Return the least seconds of a step: the longer of reading the weights and multiplying the rows in bfloat16."""
    cost = model_cost(config, dtype_bytes=2)
    if name in BITS:
        layers, head = BITS[name]
        read_bytes = (cost.layer_parameters * layers + cost.head_parameters * head) / 8
    else:
        read_bytes = find_gguf().stat().st_size
    return max(read_bytes / (limits.read_gb_s * 1e9), 2 * cost.parameters * rows / (limits.gemm_gflops[rows] * 1e9))


@contextmanager
def _llama_cpp(python: Path, adapter: Path) -> Iterator[tuple[Callable[[int, int, int, bool, int], float], str]]:
    """Yield a function that runs llama.cpp's decode, and its version."""
    command = [str(python), str(ROOT / "benchmarks" / "llamacpp_decode.py"), str(find_gguf())]
    command += ["--threads", str(THREADS), "--lora", str(adapter)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        asked = process.stdin
        answers = process.stdout

        def ask(sequences: int, prompt_tokens: int, steps: int, adapted: bool, turn: int) -> float:
            work = {"sequences": sequences, "prompt_tokens": prompt_tokens, "steps": steps, "adapter": adapted}
            print(json.dumps(work), file=asked, flush=True)
            return float(_answer(process, answers)["tokens_per_s"])

        yield ask, str(_answer(process, answers)["version"])
        asked.close()


def _answer(process: "subprocess.Popen[str]", answers: IO[str]) -> dict[str, Any]:
    line = answers.readline()
    if not line:
        raise RuntimeError(f"llama.cpp ended with code {process.wait()}")
    answer: dict[str, Any] = json.loads(line)
    return answer


if __name__ == "__main__":
    main()
