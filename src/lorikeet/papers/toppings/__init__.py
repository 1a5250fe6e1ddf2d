"""TOPPINGS: host cores assist prefills while their adapter is loaded, and rank-aware scheduling."""
