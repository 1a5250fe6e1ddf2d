"""Write the tables of ``docs/api.md`` from ``lorikeet.api.route_list`` and ``lorikeet.api.fields``.

.venv/bin/python docs/make_api.py
"""

from pathlib import Path

from lorikeet.api.fields import BOTH, CHAT, FIELDS
from lorikeet.api.route_list import ROUTES

PAGE = Path(__file__).with_name("api.md")

_BY = "made by docs/make_api.py"


def page() -> str:
    """Return the page with its tables as they should be."""
    text = PAGE.read_text()
    for name, rows in (("routes", _routes()), ("fields", _fields())):
        begin, end = f"<!-- {name}: {_BY} -->", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n" + "\n".join(rows) + f"\n{end}{rest.partition(end)[2]}"
    return text


def _routes() -> list[str]:
    rows = ["| route | state | notes |", "|---|---|---|"]
    for each in ROUTES:
        names = ", ".join(f"`{route}`" for route in each.routes)
        rows.append(f"| {names} | {each.state} | {each.notes} |")
    return rows


def _fields() -> list[str]:
    rows = ["| field | routes | notes |", "|---|---|---|"]
    for field in FIELDS:
        names = ", ".join(f"`{name}`" for name in field.names)
        where = "both" if field.routes == BOTH else "chat" if field.routes == (CHAT,) else "completions"
        rows.append(f"| {names} | {where if field.routes else '501'} | {field.meaning} |")
    return rows


if __name__ == "__main__":
    PAGE.write_text(page())
