"""Implements TOPPINGS: host cores assist prefills while their adapter is loaded, and scheduling is rank-aware."""
