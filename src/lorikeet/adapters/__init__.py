"""PEFT LoRA adapters: validation, sources, a content-addressed store, and the registry of names.

No module here imports torch, so the package can run in the API process.
"""
