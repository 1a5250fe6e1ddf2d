"""Converts adapters: other types to LoRA, formats of other programs to PEFT's, several adapters to one."""
