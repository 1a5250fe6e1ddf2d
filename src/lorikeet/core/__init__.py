"""Values that all packages share: requests, step plans and results, messages, events, clocks, the executor protocol.

Imports nothing else of Lorikeet.
"""
