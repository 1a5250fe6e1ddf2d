"""The vocabulary that every room shares. Imports nothing else of Lorikeet."""
