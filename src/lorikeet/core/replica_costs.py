"""The costs of one replica's steps and loads, as a few numbers that routing, placement and reports compare.

The costs are first estimated from the device and the model, or from a profile (``costs.replica_estimates``).
Measurements replace the estimates once the replica has run some steps.
"""

import msgspec


class ReplicaCosts(msgspec.Struct, frozen=True):
    """Costs of one replica in seconds.

    A step takes the sum of its parts.

    Attributes:
        step_s: cost of every step.
        prefill_token_s: cost per token of a prompt.
        decode_s: cost per sequence that decodes.
        lora_s: additional cost of a step with at least one adapter.
        lora_prefill_s: cost per token of a prompt and rank, as the kernel form counts them.
        lora_decode_s: cost per decode and rank. Every decode reads the weights of its adapter for one token.
        load_s, load_bytes_per_s: loading an adapter of b bytes to the device takes ``load_s + b / load_bytes_per_s``
            seconds.
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
        """Return the seconds that a prompt of this many tokens adds to a step."""
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
        """Return whether typical steps and loads of both differ by at most the share ``tolerance``.

        A small part of a step may differ by more, since it changes no decision.
        """
        return all(
            abs(mine - theirs) <= tolerance * max(mine, theirs)
            for mine, theirs in (
                (self.decode_step_s(8, 16), other.decode_step_s(8, 16)),
                (self.unloaded_ttft_s(512), other.unloaded_ttft_s(512)),
                (self.load_time_s(10e6), other.load_time_s(10e6)),
            )
        )
