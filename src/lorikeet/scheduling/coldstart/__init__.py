"""Cold starts: what a prefill takes whose adapter is still on its way, and how the adapter should come (TOPPINGS).

Pure: nothing here touches tensors, processes or clocks.
"""
