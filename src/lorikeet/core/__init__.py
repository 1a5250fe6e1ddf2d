"""Values that all packages share: requests, plans, messages, events, clocks, the executor protocol.

Imports nothing else of Lorikeet.
"""
