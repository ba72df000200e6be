"""Tables in the marked places of pages: ``<!-- name -->``, the table,
``<!-- end -->``."""

import re


def markdown(rows: list[list[str]]) -> str:
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def filled(text: str, tables: dict[str, str]) -> str:
    """A page with every table in its marked place."""
    for name, table in tables.items():
        mark = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        text, count = re.subn(
            mark, lambda m, t=table: f"{m[1]}{t}\n{m[2]}", text, flags=re.S
        )
        assert count == 1, f"there are {count} places for {name}"
    return text
