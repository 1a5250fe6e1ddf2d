"""Why figures of ELORA came out otherwise, by claim, in Markdown."""

CAUSES: dict[str, str] = {}
