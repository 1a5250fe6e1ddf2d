"""Settings of five papers on the modelled executor, beside the figures that the papers print; one module per paper.

``python -m benchmarks.papers.elora`` and so on. Everything is *modelled*: the engine's loop, memory and policies run on
a virtual clock, with a profile of the device. Results are cached, so an interrupted program can continue.
"""
