"""``lorikeet router``: one address for servers that others started; it places adapters and routes requests."""
