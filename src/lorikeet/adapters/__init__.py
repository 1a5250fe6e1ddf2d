"""PEFT LoRA adapters: validation, sources, a content-addressed store, and the registry of names.

Nothing here imports torch, so all of it can run in the API process.
"""
