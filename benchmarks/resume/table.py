"""Writes the measured table into the documentation."""

import json
from pathlib import Path
from typing import Any

from benchmarks.resume.harness import summary

RESULTS = Path("benchmarks/results/resume")
PAGE = Path("docs/resume_compared.md")
BEGIN, END = "<!-- table: python -m benchmarks.resume table -->", "<!-- end of table -->"


def rows() -> str:
    """Returns the table in Markdown."""
    found: list[dict[str, Any]] = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    found.sort(key=lambda saved: ("this project" in saved["name"], saved["name"]))
    lines = [
        "| run | version | kills | equal final weights | distance | counted, in no update | used again | equal updates "
        "| unreadable checkpoints |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for saved in found:
        s = summary(saved)
        name = saved["name"] if saved["link"].endswith(".md") else f"[{saved['name']}]({saved['link']})"
        distance = "0" if s["distance"] == 0 else f"{s['distance']:.2g}"
        lines.append(
            f"| {name} | {saved['version']} | {s['kills']} | {s['identical']} of {s['runs']} | {distance} | "
            f"{s['lost']:,} of {s['units']:,} {saved['unit']} | {s['repeated']:,} | {s['same_updates']:.0%} | "
            f"{s['damaged']} |"
        )
    lines += ["", "How each was saved and resumed:", "", "| run | how | in its own words |", "|---|---|---|"]
    ways = dict.fromkeys((s["name"] if "this project" not in s["name"] else "this project", s["way"], s["quote"],
                          s["link"]) for s in found)  # fmt: skip
    lines += [f"| {name} | {way} | “{quote}” ([page]({link})) |" for name, way, quote, link in ways]
    return "\n".join(lines)


def write() -> None:
    """Replaces the table between the markers of the page."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{rows()}\n\n{END}{after}")
