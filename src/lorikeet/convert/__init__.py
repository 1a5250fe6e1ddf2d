"""Converts adapters: other types to LoRA, other programs' formats to PEFT's, and several adapters to one."""
