"""The whole engine on a GPU, where there is one: graphs, streams, registered memory, host workers, merging."""

import pytest
import torch

from lorikeet.engine.build import build_replica
from lorikeet.worker.torch_executor import TorchExecutor
from tests.support.driver import (
    AMPLE,
    SCARCE,
    Models,
    answer,
    check_answers,
    driving,
    greedy_requests,
    make_models,
    random_tokens,
    tight_settings,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(
    ("preset", "memory_bytes", "host_memory_bytes"),
    [
        ("auto", SCARCE, 0),
        ("auto", AMPLE, 0),
        ("lorikeet:plain-padded", AMPLE, 0),
        ("lorikeet:plain-einsum", AMPLE, 0),
        ("elora", SCARCE, 600_000),
        ("elora:wom", SCARCE, 100_000),
        ("vllm-static,adapter_share=0.7", SCARCE, 600_000),
        ("chameleon:no-scheduler", SCARCE, 300_000),
        ("toppings", SCARCE, 600_000),
        ("merged-only", AMPLE, 0),
        ("dlora", AMPLE, 0),
    ],
)
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_tokens_are_those_of_transformers_and_peft(
    models: Models, preset: str, memory_bytes: int, host_memory_bytes: int, eager: bool
) -> None:
    settings = tight_settings(
        models.folder,
        preset=preset,
        device="cuda",
        kernels="auto",
        memory_bytes=memory_bytes,
        host_memory_bytes=host_memory_bytes,
        enforce_eager=eager,
    )
    built = build_replica(settings)
    requests = greedy_requests([None, *models.adapters.values()], 16, max_tokens=24)
    try:
        outputs = answer(built.engine, requests)
        executor = built.engine._executor
        assert isinstance(executor, TorchExecutor)
        graphs = executor._graphs
    finally:
        built.engine.close()
    assert built.sizes.kernels == "triton"
    assert (graphs is None) == eager
    check_answers(models.folder, requests, outputs)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0, "seed": 5},
        {"temperature": 1.3, "seed": 5, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
        {"temperature": 1.0, "seed": 5, "frequency_penalty": 0.7, "logprobs": 2},
    ],
    ids=["drawn", "filtered", "edited"],
)
def test_drawn_tokens_are_those_of_a_cpu(models: Models, params: dict[str, object]) -> None:
    def drawn(device: str, kernels: str) -> list[list[int]]:
        narrow, attention, _ = models.adapters.values()
        with driving(models.folder, device=device, kernels=kernels, max_num_seqs=6) as driver:
            driver.load(narrow, attention)
            for i, adapter in enumerate((None, narrow, attention)):
                driver.add(f"r{i}", random_tokens(3 + i, seed=i), adapter, **params)
            names = [f"r{i}" for i in range(3)]
            driver.step({name: 3 + i for i, name in enumerate(names)})
            driver.decode(names, 12, 4)
            return [driver.token_ids(name) for name in names]

    assert drawn("cuda", "triton") == drawn("cpu", "auto")
