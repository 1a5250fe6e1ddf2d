"""How many tokens an answer will have: an oracle for simulations, history per adapter, and a learned head."""
