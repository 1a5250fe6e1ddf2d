"""``lorikeet route``: one address for servers that somebody else started."""
