"""Table of the JSON Schema keywords in docs/structured-output.md, made of the cases in `support_cases`.

Write it with `python -m tests.grammar.support_table`.
"""

from __future__ import annotations

from pathlib import Path

from .support_cases import KEYWORDS, Keyword

PAGE = Path(__file__).parents[2] / "docs" / "structured-output.md"
BEGIN = "<!-- support table: made by tests/grammar/support_table.py -->\n"
END = "<!-- end of the support table -->\n"


def table() -> str:
    """Return the table in Markdown."""
    return "".join(["| keyword | | |\n|---|---|---|\n", *map(_line, KEYWORDS)])


def _line(keyword: Keyword) -> str:
    names = ", ".join(f"`{name}`" if " " not in name else name for name in keyword.name.split(", "))
    return f"| {names} | {keyword.state} | {keyword.note} |\n"


def page_with_table(page: str) -> str:
    """Return the page with the current table between its marks."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page_with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
