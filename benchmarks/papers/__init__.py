"""The five papers' settings by the modelled executor, beside what the papers print; one module a paper.

``python -m benchmarks.papers.elora`` and so on. Everything is *modelled*: the engine's own loop, memory and policies on
a virtual clock, by a profile of the device. Runs are kept in a cache, so that a program that was interrupted goes on.
"""
