"""``lorikeet router``: places adapters on running servers and routes requests to them, behind one address."""
