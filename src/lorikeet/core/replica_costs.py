"""What steps and loads cost on one replica, as a few numbers: the currency of routing, placement and reports.

They begin as a guess from the device and the sizes of the model (``costs.prior``), or come from a profile, and are
replaced by what the replicas measure of their own steps.
"""

import msgspec


class ReplicaCosts(msgspec.Struct, frozen=True):
    """Costs of one replica. A step takes the sum of its parts.

    Attributes:
        step_s: of every step.
        prefill_token_s: per token of a prompt.
        decode_s: per sequence that decodes.
        lora_s: once, if the step has an adapter.
        lora_prefill_s: per token of a prompt and rank, as the kernel form counts them.
        lora_decode_s: the same of decodes, which read the weights of their adapter for one token each.
        load_s, load_bytes_per_s: an adapter of b bytes is loaded to the device in ``load_s + b / load_bytes_per_s``.
    """

    step_s: float
    prefill_token_s: float
    decode_s: float
    lora_s: float = 0.0
    lora_prefill_s: float = 0.0
    lora_decode_s: float = 0.0
    load_s: float = 0.0
    load_bytes_per_s: float = 25e9

    def prefill_s(self, tokens: float, rank: int = 0) -> float:
        """Return by how much a prompt of so many tokens lengthens a step."""
        return tokens * (self.prefill_token_s + self.lora_prefill_s * rank)

    def decode_step_s(self, sequences: float, rank: float = 0.0) -> float:
        """Return the time of a step of decoding sequences with adapters of this rank; 0 for the base model."""
        lora_s = self.lora_s + self.lora_decode_s * rank * sequences if rank else 0.0
        return self.step_s + self.decode_s * sequences + lora_s

    def load_time_s(self, adapter_bytes: float) -> float:
        """Return the time to load an adapter to the device."""
        return self.load_s + adapter_bytes / self.load_bytes_per_s

    def unloaded_ttft_s(self, prompt_tokens: float) -> float:
        """Return the TTFT of a request that finds its adapter loaded and the replica idle."""
        return self.step_s + self.prefill_s(prompt_tokens)

    def is_near(self, other: "ReplicaCosts", tolerance: float) -> bool:
        """Return whether no part differs by more than ``tolerance`` of a typical step of either.

        A part that hardly counts may change a lot without changing any decision.
        """
        return all(
            abs(mine - theirs) <= tolerance * max(mine, theirs)
            for mine, theirs in (
                (self.decode_step_s(8, 16), other.decode_step_s(8, 16)),
                (self.unloaded_ttft_s(512), other.unloaded_ttft_s(512)),
                (self.load_time_s(10e6), other.load_time_s(10e6)),
            )
        )


ANSWER_SHARE = 1 / 16
"""A running answer that is delayed counts as such a part of a request that waits for its first token. Chosen on the odd
scenarios of benchmarks/auto and the 40 workloads of tests/simulator/test_host_tier."""

UNLOADED_TIMES = 5.0
"""Where no target is set, a latency counts as met up to this many times that of an unloaded replica."""

BUSY_SHARE = 0.8
"""Share of its throughput at which a replica still answers within ``UNLOADED_TIMES`` its unloaded TTFT.

In a queue with exponential gaps and services, a request takes 1 / (1 - share) services in the mean.
"""


def estimated_load(
    costs: ReplicaCosts,
    rank: int,
    prompt_tokens: int,
    output_tokens: int,
    max_batch: int,
    tpot_s: float = 0.0,
) -> float:
    """Return how many tokens per second a replica serves within its targets if all adapters have this rank.

    It decodes in the largest batch whose step stays within the TPOT target, and prefills beside that.

    Args:
        costs: of the replica.
        rank: of every adapter.
        prompt_tokens, output_tokens: of every request.
        max_batch: most sequences in a step.
        tpot_s: target; 0 for ``UNLOADED_TIMES`` that of one sequence alone.
    """
    limit_s = tpot_s or UNLOADED_TIMES * costs.decode_step_s(1, rank)
    fixed_s = costs.decode_step_s(0, rank)
    sequence_s = costs.decode_step_s(1, rank) - fixed_s
    batch = max_batch if sequence_s <= 0 else (limit_s - fixed_s) / sequence_s
    batch = min(max(batch, 1.0), float(max_batch))
    request_s = costs.prefill_s(prompt_tokens, rank) + output_tokens * costs.decode_step_s(batch, rank) / batch
    return BUSY_SHARE * (prompt_tokens + output_tokens) / max(request_s, 1e-9)
