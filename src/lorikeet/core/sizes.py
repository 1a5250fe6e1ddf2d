"""Numbers of bytes as people read them."""


def format_size(size_bytes: int) -> str:
    """Return ``size_bytes`` for people, in powers of 1024."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
