"""The failure matrix as the tables of docs/failure-matrix.md."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from matrixcells import CLIENT, DECODE, PREFILL, PROTOCOLS, Cell, Counts, Expected, expected

MARKS = re.compile(r"(<!-- matrix -->\n).*?(<!-- /matrix -->)", re.DOTALL)
TITLES = {
    False: "One pod of each role",
    True: "A good pod of each role beside the faulty one",
}
ENDS = {"whole": "", "error": "", "event": ", then an error event", "cut": ", then cut", "left": ""}
Key = tuple[str, str, str]


def page_of(page: str, found: Mapping[Cell, list[str]]) -> str:
    """`page` with the tables of these cells between its marks; `found` are their problems."""
    tables = [table(spare, found) for spare in TITLES]
    count = f"{len(found)} cells ran; {sum(map(bool, found.values()))} of them not as they have to."
    text = "\n".join([count, "", *tables])
    return MARKS.sub(lambda match: match[1] + text + match[2], page)


def table(spare: bool, found: Mapping[Cell, list[str]]) -> str:
    """One table: a row for each set of faults, a column for each protocol."""
    rows: dict[Key, dict[str, list[Cell]]] = {}
    for cell in found:
        if cell.spare is spare:
            row = rows.setdefault((cell.prefill, cell.decode, cell.client), {})
            row.setdefault(cell.protocol, []).append(cell)
    lines = [f"### {TITLES[spare]}", ""]
    lines.append("| prefill | decode | client | " + " | ".join(PROTOCOLS) + " |")
    lines.append("|---" * (3 + len(PROTOCOLS)) + "|")
    for key in sorted(rows, key=_order):
        texts = [_texts(rows[key].get(protocol, ()), found) for protocol in PROTOCOLS]
        lines.append("| " + " | ".join([*key, *texts]) + " |")
    return "\n".join(lines) + "\n"


def _order(key: Key) -> tuple[int, int, int, int]:
    """Single faults first, then pairs."""
    prefill, decode, client = key
    places = (
        [*map(str, PREFILL)].index(prefill),
        [*map(str, DECODE)].index(decode),
        [*map(str, CLIENT)].index(client),
    )
    return sum(place > 0 for place in places), *places


def _texts(cells: Iterable[Cell], found: Mapping[Cell, list[str]]) -> str:
    """What comes of a set of faults: once, where streams and whole answers end alike."""
    by_kind = {"stream" if cell.stream else "whole": _text(cell, found[cell]) for cell in cells}
    if len(set(by_kind.values())) == 1:
        return next(iter(by_kind.values()))
    return "<br>".join(f"{kind}: {text}" for kind, text in sorted(by_kind.items()))


def _text(cell: Cell, problems: list[str]) -> str:
    if problems:
        return "**WRONG**: " + "; ".join(problems).replace("|", "/")
    want = expected(cell)
    return " · ".join(filter(None, [_ends(want), _calls(want), _cancelled(want)]))


def _ends(want: Expected) -> str:
    told = [f"{status}{ENDS[end]}" if status else "–" for status, end in sorted(want.ends)]
    return " or ".join(told)


def _calls(want: Expected) -> str:
    return "+".join(_range([want.calls[f"{letter}1"], want.calls[f"{letter}2"]]) for letter in "pd")


def _range(counts: list[Counts]) -> str:
    least, most = sum(map(min, counts)), sum(map(max, counts))
    return str(least) if least == most else f"{least}–{most}"


def _cancelled(want: Expected) -> str:
    surely = {name[0] for name in want.cancelled}
    perhaps = {name[0] for name in want.may_cancel if max(want.calls[name])} - surely
    told = [letter if letter in surely else f"({letter})" for letter in "pd"]
    return "".join(
        one for letter, one in zip("pd", told, strict=True) if letter in surely | perhaps
    )
