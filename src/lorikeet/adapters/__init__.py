"""PEFT LoRA checkpoints in: checks, sources, a content-addressed store and the registry of names.

Only ``weights.py`` imports torch; everything else also runs in the API process.
"""
