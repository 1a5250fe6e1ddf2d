"""Write the table of fields in ``docs/api.md`` from ``lorikeet.api.fields``.

.venv/bin/python docs/make_api.py
"""

from pathlib import Path

from lorikeet.api.fields import BOTH, CHAT, FIELDS

PAGE = Path(__file__).with_name("api.md")

_BEGIN, _END = "<!-- fields: made by docs/make_api.py -->", "<!-- end of fields -->"


def page() -> str:
    """Return the page with the table of fields as it should be."""
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    return f"{before}{_BEGIN}\n{_table()}{_END}{rest.partition(_END)[2]}"


def _table() -> str:
    rows = ["| field | routes | notes |", "|---|---|---|"]
    for field in FIELDS:
        names = ", ".join(f"`{name}`" for name in field.names)
        where = "both" if field.routes == BOTH else "chat" if field.routes == (CHAT,) else "completions"
        rows.append(f"| {names} | {where if field.routes else '501'} | {field.meaning} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
