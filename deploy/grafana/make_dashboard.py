"""Write ``dashboards/lorikeet.json``: .venv/bin/python deploy/grafana/make_dashboard.py."""

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("dashboards") / "lorikeet.json"
_SOURCE = {"type": "prometheus", "uid": "prometheus"}
_HERE = 'instance=~"$instance",model_name=~"$model"'


def _quantile(metric: str, share: float, by: str = "le") -> str:
    return f"histogram_quantile({share}, sum by ({by}) (rate({metric}_bucket{{{_HERE}}}[$__rate_interval])))"


def _rate(metric: str, by: str = "") -> str:
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({metric}{{{_HERE}}}[$__rate_interval]))"


def _mean(metric: str) -> str:
    return f"{_rate(f'{metric}_sum')} / {_rate('vllm:time_to_first_token_seconds_count')}"


_PANELS: tuple[tuple[str, str, bool, dict[str, str]], ...] = (
    ("Tokens generated per second", "short", False, {"tokens": _rate("vllm:generation_tokens_total")}),
    (
        "Requests per second",
        "reqps",
        False,
        {"{{finished_reason}}": _rate("vllm:request_success_total", "finished_reason")},
    ),
    (
        "TTFT",
        "s",
        False,
        {f"P{100 * share:.0f}": _quantile("vllm:time_to_first_token_seconds", share) for share in (0.5, 0.9, 0.99)},
    ),
    (
        "ITL",
        "s",
        False,
        {f"P{100 * share:.0f}": _quantile("vllm:inter_token_latency_seconds", share) for share in (0.5, 0.9, 0.99)},
    ),
    (
        "TTFT: mean wait of a request by part",
        "s",
        True,
        {
            "queue": _mean("vllm:request_queue_time_seconds"),
            "adapter": _mean("lorikeet:request_adapter_wait_seconds"),
            "KV": _mean("lorikeet:request_kv_wait_seconds"),
        },
    ),
    (
        "Requests queued by cause",
        "short",
        True,
        {"{{cause}}": f"sum by (cause) (lorikeet:num_requests_queued{{{_HERE}}})"},
    ),
    (
        "Adapters: P90 of TTFT, the slowest ten",
        "s",
        False,
        {"{{adapter}}": f"topk(10, {_quantile('lorikeet:adapter_ttft_seconds', 0.9, 'adapter, le')})"},
    ),
    (
        "Adapters: wait for transfers per request",
        "s",
        False,
        {
            "{{adapter}}": f"topk(10, {_rate('lorikeet:adapter_load_wait_seconds_total', 'adapter')} / "
            f"{_rate('lorikeet:adapter_requests_total', 'adapter')})"
        },
    ),
    (
        "Adapters: requests per second, the busiest ten",
        "reqps",
        False,
        {"{{adapter}}": f"topk(10, {_rate('lorikeet:adapter_requests_total', 'adapter')})"},
    ),
    (
        "Adapters: failed requests per second",
        "reqps",
        False,
        {"{{adapter}}": _rate("lorikeet:adapter_requests_failed_total", "adapter")},
    ),
    ("Device memory", "bytes", True, {"{{kind}}": f'sum by (kind) (lorikeet:memory_bytes{{tier="device",{_HERE}}})'}),
    ("Host memory", "bytes", True, {"{{kind}}": f'sum by (kind) (lorikeet:memory_bytes{{tier="host",{_HERE}}})'}),
    (
        "Adapter hits",
        "percentunit",
        False,
        {"share": f"{_rate('lorikeet:memory_adapter_hits_total')} / {_rate('lorikeet:memory_adapter_queries_total')}"},
    ),
    ("Seconds saved per second", "s", True, {"{{mechanism}}": _rate("lorikeet:seconds_saved_total", "mechanism")}),
    ("Replicas", "short", False, {"{{state}}": 'sum by (state) (lorikeet:cluster_replicas{instance=~"$instance"})'}),
    (
        "Preemptions and refusals per second",
        "reqps",
        False,
        {
            "preempted": _rate("vllm:num_preemptions_total"),
            "{{reason}}": f"sum by (reason) (rate(vllm:admission_rejections_total{{{_HERE}}}[$__rate_interval]))",
        },
    ),
)


def dashboard() -> dict[str, Any]:
    """Return the dashboard."""
    panels = []
    for number, (title, unit, stacked, queries) in enumerate(_PANELS):
        custom = {"fillOpacity": 30 if stacked else 5, "stacking": {"mode": "normal" if stacked else "none"}}
        panels.append(
            {
                "id": number + 1,
                "type": "timeseries",
                "title": title,
                "datasource": _SOURCE,
                "gridPos": {"h": 8, "w": 12, "x": 12 * (number % 2), "y": 8 * (number // 2)},
                "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": custom}, "overrides": []},
                "options": {"tooltip": {"mode": "multi"}},
                "targets": [
                    {
                        "refId": chr(65 + at),
                        "datasource": _SOURCE,
                        "expr": query,
                        "legendFormat": name,
                        "exemplar": title == "TTFT",
                    }
                    for at, (name, query) in enumerate(queries.items())
                ],
            }
        )
    variables = [
        {
            "name": name,
            "label": name,
            "type": "query",
            "datasource": _SOURCE,
            "query": f"label_values(lorikeet:engine_up, {label})",
            "includeAll": True,
            "multi": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
            "refresh": 2,
        }
        for name, label in (("instance", "instance"), ("model", "model_name"))
    ]
    return {
        "uid": "lorikeet",
        "title": "Lorikeet",
        "tags": ["lorikeet"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "panels": panels,
    }


def content() -> str:
    """Return the file's content."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(content())
