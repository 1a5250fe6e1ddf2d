"""Models costs: profiles of machines and models, and the performance models built from them."""
