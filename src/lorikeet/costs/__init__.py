"""What things cost: profiles of machines and models, and the performance models made of them."""
