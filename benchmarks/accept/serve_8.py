"""serve.8: adapters cost a base-only batch nothing, counted in kernel calls."""

import tempfile
from pathlib import Path

from benchmarks.accept.inprocess import default_kernels, kernels_as, replica, run_all
from benchmarks.accept.lines import Result, line
from benchmarks.accept.models import default_model
from benchmarks.accept.runs import StoredRuns
from lorikeet.adapters.store import reference
from lorikeet.bench.adapters import write_random_adapter
from lorikeet.core.ids import RequestId
from lorikeet.core.request import Request, SamplingParams
from lorikeet.kernels.recording import Call, RecordingKernels

ADAPTERS, REQUESTS, TOKENS = 20, 8, 6


@line(
    "serve.8",
    title="Kernel calls of a base-only batch with 20 adapters and with none",
    bound="identical sequences",
)
def run(runs: StoredRuns) -> Result:
    """Record the calls of one base-only batch, before any adapter is known and with 20 on the device."""
    model = default_model()
    kernels = RecordingKernels(default_kernels())
    with (
        tempfile.TemporaryDirectory(prefix="lorikeet-calls-") as scratch,
        kernels_as(kernels),
        replica(model, "bfloat16") as built,
    ):

        def base_only(name: str) -> list[Call]:
            kernels.calls.clear()
            # Prompts that differ between the runs, so that neither finds KV of the other.
            first = 100 if name == "without" else 200
            run_all(built, [_request(f"{name}-{i}", [first + i] * (20 + i), TOKENS) for i in range(REQUESTS)])
            return list(kernels.calls)

        without = base_only("without")
        folders = [
            write_random_adapter(Path(scratch) / f"a{i}", built.sizes.geometry, 8, seed=i) for i in range(ADAPTERS)
        ]
        refs = [reference(folder.name, folder, built.sizes.geometry) for folder in folders]
        kernels.calls.clear()
        run_all(built, [_request(f"warm-{i}", [i + 1, i + 2], 1, ref) for i, ref in enumerate(refs)])
        lora_calls = sum(call[0] == "linear with lora" for call in kernels.calls)
        resident = len(built.engine.stats().resident_adapters)
        with_adapters = base_only("with")
    passed = without == with_adapters and resident == ADAPTERS and lora_calls > 0 and len(without) > 0
    return Result(
        figure={
            "calls_without": len(without),
            "calls_with": len(with_adapters),
            "identical": without == with_adapters,
            "resident_adapters": resident,
            "lora_calls_while_warming": lora_calls,
        },
        passed=passed,
        cause="" if passed else "the sequences differ",
        notes="a call is its kernel, the shapes of its tensors and its plain arguments",
    )


def _request(name: str, prompt: list[int], tokens: int, adapter: object = None) -> Request:
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0)
    return Request(RequestId(name), prompt, sampling, 0.0, adapter)  # type: ignore[arg-type]
