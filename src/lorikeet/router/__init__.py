"""``lorikeet router``: one address, with placement and routing of adapters, for servers that others started."""
