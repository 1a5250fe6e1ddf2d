"""Systems that several papers compare with: vLLM with static memory, and S-LoRA's admission."""
