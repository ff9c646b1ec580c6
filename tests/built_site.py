"""Checks a built site: ``python -m tests.built_site site`` lists what its pages fetch from other hosts, equations that
no script renders, and formulas that stand in the text as source.
"""

import re
import sys
from pathlib import Path

#: What a browser fetches by itself; a link is fetched when a person follows it.
FETCHED = re.compile(
    r"""<(?:script|img|iframe|source|video)\b[^>]*\bsrc=["']?((?:https?:)?//[^"'\s>]+)"""
    r"""|<link\b(?=[^>]*\brel=["']?(?:stylesheet|preload|preconnect|icon))[^>]*\bhref=["']?((?:https?:)?//[^"'\s>]+)"""
)
CODE = re.compile(
    r"<(pre|code|script|span class=\"arithmatex\"|div class=\"arithmatex\").*?</(?:pre|code|script|span|div)>", re.S
)


def findings(folder: Path) -> list[str]:
    """Returns one line for each thing that is wrong with a page."""
    found = []
    for path in sorted(folder.rglob("*.html")):
        html, name = path.read_text("utf-8"), path.relative_to(folder).as_posix()
        if name.startswith("source/"):  # quoted files
            continue
        found += [f"{name}: fetches {one or other}" for one, other in FETCHED.findall(html)]
        if 'class="arithmatex"' in html and "katex.min.js" not in html:
            found.append(f"{name}: has equations and no KaTeX")
        found += [f"{name}: shows {match[:60]!r} as text" for match in re.findall(r"\$\$[^$]+\$\$", CODE.sub("", html))]
    return found


if __name__ == "__main__":
    lines = findings(Path(sys.argv[1] if len(sys.argv) > 1 else "site"))
    print("\n".join(lines) or "nothing is fetched from other hosts, and every equation is rendered")
    raise SystemExit(bool(lines))
