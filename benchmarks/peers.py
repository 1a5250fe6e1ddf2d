"""How many tokens per second Lorikeet and its peers generate, side by side: ``python -m benchmarks.peers``.

All sides get the same requests at once and run in turns, in one dtype, on the same cores. The machine's limit is
measured in the same minutes. ``lorikeet bench offline`` runs one such comparison with any numbers; this program runs
those that docs/performance.md shows.

Peers: ``peft`` (transformers with PEFT, from the extra ``peers``), ``vllm`` and ``vllm-base`` (vLLM's CPU build with
and without adapters, from ``python -m benchmarks.vllm_environment``), ``llama.cpp`` (``llama-batched-bench`` on the
path or by ``--llama-bench``; base model only, in bfloat16). Peers that are not installed are left out and named.
"""

import argparse
import json
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import THREADS, default_model, print_setup, print_table
from lorikeet.bench.offline import OfflineOptions, run_offline
from lorikeet.bench.vllm_backend import DEFAULT_PYTHON
from lorikeet.models.default import find_gguf

LLAMA_CPP, VLLM = "llama.cpp", ("vllm", "vllm-base")
PEERS = ("peft", *VLLM, LLAMA_CPP)


class Comparison(NamedTuple):
    """Work that sides are compared on.

    Attributes:
        name: of the work, in words.
        requests, prompt_tokens, output_tokens: all requests come at once.
        adapters: how many; 0 for the base model.
        rank: of the adapters; 0 for ranks from 8 to 128.
        peers: that can run it.
        is_prefill: prompt tokens count, too.
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
    options = parser.parse_args()
    print_setup()
    wanted = available(options.peers.split(","), options.llama_bench)
    chosen = COMPARISONS if options.only is None else COMPARISONS[options.only - 1 : options.only]
    for work in chosen:
        compare(work, [peer for peer in work.peers if peer in wanted], options.pairs, options.llama_bench)


def available(peers: Sequence[str], llama_bench: str) -> list[str]:
    """Return the peers that can run here, and print why others cannot.

    Raises:
        SystemExit: one is not known.
    """
    if unknown := set(peers) - set(PEERS):
        raise SystemExit(f"unknown peers: {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    reasons = {LLAMA_CPP: "" if llama_bench else "llama-batched-bench is not on the path"}
    reasons["peft"] = "" if find_spec("peft") else "PEFT is not installed (extra `peers`)"
    for name in VLLM:
        reasons[name] = "" if DEFAULT_PYTHON.is_file() else "python -m benchmarks.vllm_environment has not been run"
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

    Its benchmark gives all prompts as one batch and then decodes them together, which is the same work. It is a
    process of its own, so it cannot run in turns and comes last.
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
        kind, inner = field.types[0], field.types[-1]
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


if __name__ == "__main__":
    main()
