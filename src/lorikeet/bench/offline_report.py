"""The figures of an offline comparison, as plain data.

Speeds are medians over the pairs. Ratios and shares are medians of what each pair gives by itself, because ratios do
not drift with the machine; intervals are 95 % bootstrap intervals of those medians.

    output_tok_s, total_tok_s      Lorikeet: generated tokens, and all tokens, per second
    decode_tok_s                   generated tokens per second once every request has its first token
    limit_output_tok_s, limit_total_tok_s, limit_decode_tok_s, limit_prefill_tok_s
                                   what the machine allows (lorikeet.bench.ceilings)
    share_of_limit                 {"output", "decode"} → {"share", "interval"}
    limits                         read_gb_s and gemm_gflops behind them
    peers                          name → output_tok_s, total_tok_s, ratio, ratio_interval, ratios,
                                   share_of_limit, first_tokens_equal
    runs_s                         name → seconds of each run

A peer without adapters (``vllm-base``) is held against the same limit, that of the work with adapters, and its first
tokens are the base model's.

With one peer its figures stand at the top as well: peer, peer_output_tok_s, peer_total_tok_s, ratio, ….
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from lorikeet.bench.ceilings import Ceilings
from lorikeet.bench.contestants import Outcome
from lorikeet.bench.limits import MachineLimits, median_limits
from lorikeet.bench.statistics import median_interval


class PairResult(NamedTuple):
    """One run of each side, and what the machine could do just before."""

    outcomes: Mapping[str, Outcome]
    limits: MachineLimits
    ceilings: Ceilings


def offline_report(pairs: Sequence[PairResult], names: Sequence[str], tokens: tuple[int, int]) -> dict[str, Any]:
    """Return the figures of all pairs.

    Args:
        pairs: at least one.
        names: of the sides, Lorikeet's first.
        tokens: generated tokens of a run, and all its tokens.
    """
    ours, *others = names
    report: dict[str, Any] = _speeds(pairs, ours, tokens)
    decoded = [pair.outcomes[ours].decode_tok_s for pair in pairs]
    rates = [rate for rate in decoded if rate is not None]
    report["decode_tok_s"] = statistics.median(rates) if rates else None
    for field in msgspec.structs.fields(Ceilings):
        report[f"limit_{field.name}"] = statistics.median(getattr(pair.ceilings, field.name) for pair in pairs)
    report["share_of_limit"] = {"output": _shares(pairs, ours, tokens[0])}
    if rates:
        shares = [rate / pair.ceilings.decode_tok_s for rate, pair in zip(rates, pairs, strict=True)]
        report["share_of_limit"]["decode"] = _median_share(shares)
    report["limits"] = msgspec.to_builtins(median_limits([pair.limits for pair in pairs]), str_keys=True)
    report["peers"] = {name: _peer(pairs, ours, name, tokens) for name in others}
    if len(others) == 1:
        report |= _one_peer(others[0], report["peers"][others[0]])
    return report | {"runs_s": {name: _seconds(pairs, name) for name in names}}


def _one_peer(name: str, figures: dict[str, Any]) -> dict[str, Any]:
    plain = ("ratio", "ratio_interval", "ratios", "first_tokens_equal")
    speeds = {f"peer_{key}": figures[key] for key in ("output_tok_s", "total_tok_s")}
    return {"peer": name, **speeds, **{key: figures[key] for key in plain}}


def _peer(pairs: Sequence[PairResult], ours: str, name: str, tokens: tuple[int, int]) -> dict[str, Any]:
    ratios = [theirs / mine for mine, theirs in zip(_seconds(pairs, ours), _seconds(pairs, name), strict=True)]
    return _speeds(pairs, name, tokens) | {
        "ratio": statistics.median(ratios),
        "ratio_interval": median_interval(ratios),
        "ratios": ratios,
        "share_of_limit": {"output": _shares(pairs, name, tokens[0])},
        "first_tokens_equal": _agreement(pairs, ours, name),
    }


def _seconds(pairs: Sequence[PairResult], name: str) -> list[float]:
    return [pair.outcomes[name].seconds for pair in pairs]


def _speeds(pairs: Sequence[PairResult], name: str, tokens: tuple[int, int]) -> dict[str, float]:
    median_s = statistics.median(_seconds(pairs, name))
    return {"output_tok_s": tokens[0] / median_s, "total_tok_s": tokens[1] / median_s}


def _shares(pairs: Sequence[PairResult], name: str, output_tokens: int) -> dict[str, Any]:
    return _median_share([output_tokens / pair.outcomes[name].seconds / pair.ceilings.output_tok_s for pair in pairs])


def _median_share(shares: Sequence[float]) -> dict[str, Any]:
    return {"share": statistics.median(shares), "interval": median_interval(shares)}


def _agreement(pairs: Sequence[PairResult], ours: str, name: str) -> float:
    """Share of requests whose first token is the same on both sides: a check that both did the same work."""
    equal = [
        mine[0] == theirs[0]
        for pair in pairs
        for mine, theirs in zip(pair.outcomes[ours].tokens, pair.outcomes[name].tokens, strict=True)
    ]
    return sum(equal) / len(equal)
