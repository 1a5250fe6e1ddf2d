"""Values that all packages share: requests, step plans and results, messages, events, clocks, the executor protocol.

The package imports no other package of Lorikeet.
"""
