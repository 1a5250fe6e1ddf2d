"""Implements systems that several papers use as baselines: vLLM with static memory, and S-LoRA's admission."""
