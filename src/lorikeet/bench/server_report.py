"""What a server itself says of a run: its ``/metrics`` before and after."""

from collections.abc import Mapping

import httpx
from prometheus_client.parser import text_string_to_metric_families

COUNTS = {
    "vllm:lora_adapter_load_seconds_count": "adapter loads",
    "lorikeet:request_adapter_wait_seconds_count": "requests that waited for an adapter",
    "vllm:num_preemptions_total": "preemptions",
    "lorikeet:engine_restarts_total": "engine restarts",
}
MEANS = {
    "vllm:lora_adapter_load_seconds": "mean adapter load, s",
    "lorikeet:request_adapter_wait_seconds": "mean wait for an adapter, s",
    "vllm:time_to_first_token_seconds": "mean TTFT inside the server, s",
}
SHARES = {"lorikeet:predictor_cpu_seconds_total": "length predictor, share of a core"}
"""Samples and histograms that are read where they are there, and what they are called in a report; of shares the
samples are seconds."""

_WANTED = {*COUNTS, *(f"{name}_{end}" for name in MEANS for end in ("count", "sum")), *SHARES}


def parse_counters(page: str) -> dict[str, float]:
    """Return the wanted samples of a metrics page, each summed over its labels.

    Raises:
        ValueError: it is no such page.
    """
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name in _WANTED:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def read_counters(url: str, api_key: str = "") -> dict[str, float]:
    """Read them from a server; empty if it has no such page."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        response = httpx.get(f"{url.rstrip('/')}/metrics", headers=headers, timeout=30)
        return parse_counters(response.text) if response.status_code == 200 else {}
    except (httpx.HTTPError, ValueError):
        return {}


def growth(before: Mapping[str, float], after: Mapping[str, float], passed_s: float) -> dict[str, float]:
    """Return what happened between two readings, ``passed_s`` apart, under names for people.

    A counter that was not there before began at 0. Means without a value in between are left out.
    """
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    counts = {text: grown[name] for name, text in COUNTS.items() if name in grown}
    means = {
        text: grown[f"{name}_sum"] / grown[f"{name}_count"]
        for name, text in MEANS.items()
        if grown.get(f"{name}_count")
    }
    shares = {text: grown[name] / passed_s for name, text in SHARES.items() if name in grown}
    return counts | means | shares
