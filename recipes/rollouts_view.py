"""Stored rollouts, shown in the terminal and as one HTML page."""

import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from datamodules.language.jsonl import JsonlRows
from datamodules.language.rollouts import UPDATE
from rl_modules.common.errors import UsageError

_STYLE = """body { font: 15px/1.5 sans-serif; max-width: 70em; margin: 2em auto; color: #222; }
article { border-top: 1px solid #ccc; padding: .8em 0; } pre { white-space: pre-wrap; margin: .3em 0; }
.prompt { color: #666; } b { margin-right: 1em; } span { border-radius: 2px; }"""
#: A difference of log-probabilities, in nats, that has the full color.
_FULL = 1.0


def rollout_rows(run: Path) -> list[dict[str, Any]]:
    """Returns the stored rollouts of a run's folder, of a folder of them, or of one file."""
    folder = run
    if (config := run / "config.yaml").is_file():
        found = (yaml.safe_load(config.read_text("utf-8")).get("data") or {}).get("init_args") or {}
        if found.get("rollouts_path") is None:
            raise UsageError(f"{run} stored no rollouts; give data.rollouts_path to the run, or the folder of others")
        folder = Path(found["rollouts_path"])
    files = [folder] if folder.is_file() else sorted(folder.glob("generation-*.jsonl"))
    rows = [row for file in files for _, row in JsonlRows(file) if "prompt" in row and "completion" in row]
    if not rows:
        raise UsageError(f"{folder} has no rollouts; give a run's folder, or that of data.rollouts_path")
    return rows


def chosen(
    rows: Sequence[dict[str, Any]], step: int | None, contains: str | None, finish: str | None, sort: str, reverse: bool
) -> list[dict[str, Any]]:
    """Returns the rows of a step, with a text, that ended so, by ``step``, ``reward``, ``advantage`` or ``length``."""
    kept = [
        row
        for row in rows
        if (step is None or row.get(f"{UPDATE}step") == step)
        and (contains is None or contains in f"{_text(row['prompt'])}\n{_text(row['completion'])}")
        and (finish is None or row.get(f"{UPDATE}finish_reason") == finish)
    ]
    return sorted(kept, key=lambda row: _number(row, sort), reverse=reverse)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns rows as lines of a terminal."""
    lines = [f"{'step':>6} {'reward':>8} {'advantage':>9} {'tokens':>6} {'end':<6} prompt | completion"]
    for row in rows:
        reward, advantage = (_shown(_number(row, name)) for name in ("reward", "advantage"))
        head = f"{row.get(f'{UPDATE}step', ''):>6} {reward:>8} {advantage:>9} {int(_number(row, 'length')):>6}"
        texts = f"{_plain(_text(row['prompt'])[-40:])} | {_plain(_text(row['completion']))}"
        lines.append(f"{head} {row.get(f'{UPDATE}finish_reason', ''):<6} {texts}"[:160])
    return "\n".join(lines)


def page(rows: Sequence[dict[str, Any]], title: str) -> str:
    """Returns rows as one HTML page without scripts, links or images; all text is escaped."""
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title><style>{_STYLE}</style>",
        f"<h1>{html.escape(title)}</h1><p>{len(rows):,} completions. A token is red where the update's policy finds it "
        "less likely than the one that it is compared with (the sampler, else the reference), and green where it finds "
        f"it likelier, in full at {_FULL:g} nat; without another policy it is grey by −log π.</p>",
    ]
    for row in rows:
        facts = {"step": row.get(f"{UPDATE}step"), "end": row.get(f"{UPDATE}finish_reason")}
        facts |= {name: _shown(_number(row, name)) for name in ("reward", "advantage")}
        facts |= {name: value for name, value in row.items() if name.startswith("rewards/")}
        named = "".join(f"<b>{html.escape(name)}: {html.escape(str(value))}</b>" for name, value in facts.items())
        prompt = html.escape(_text(row["prompt"]))
        parts.append(f"<article><p>{named}</p><pre class=prompt>{prompt}</pre><pre>{_tokens(row)}</pre></article>")
    return "\n".join(parts) + "\n"


def _tokens(row: dict[str, Any]) -> str:
    """A completion's tokens, colored."""
    texts, now = row.get(f"{UPDATE}tokens"), row.get(f"{UPDATE}log_probs")
    if not isinstance(texts, list) or not isinstance(now, list):
        return html.escape(_text(row["completion"]))
    names = (f"{UPDATE}sampling_log_probs", f"{UPDATE}ref_log_probs")
    others = next((row[name] for name in names if isinstance(row.get(name), list)), None)
    spans = []
    for i, (text, own) in enumerate(zip(texts, now, strict=False)):
        other = None if others is None or i >= len(others) else others[i]
        if other is None:
            color, said = f"rgba(120,120,120,{min(1.0, max(0.0, -own) / 8):.2f})", f"log π {own:.3f}"
        else:
            ratio = own - other
            strength = min(1.0, abs(ratio) / _FULL)
            color = f"rgba({'0,160,60' if ratio > 0 else '220,40,40'},{strength:.2f})"
            said = f"log π {own:.3f}, log-ratio {ratio:+.3f}"
        spans.append(f'<span style="background:{color}" title="{said}">{html.escape(str(text))}</span>')
    return "".join(spans)


def _number(row: dict[str, Any], name: str) -> float:
    if name == "length":
        return float(len(row.get("completion_ids") or ()))
    value = row.get(f"{UPDATE}{name}")
    if isinstance(value, list):  # of each token
        value = math.fsum(value) / max(1, len(value))
    return float(value) if isinstance(value, int | float) else -math.inf


def _shown(value: float) -> str:
    return "" if math.isinf(value) else f"{value:.3f}"


def _text(value: Any) -> str:
    """A text, or messages as lines."""
    if isinstance(value, list):
        return "\n".join(f"{m.get('role')}: {m.get('content')}" if isinstance(m, dict) else str(m) for m in value)
    return str(value)


def _plain(text: str) -> str:
    """A text for one line of a terminal: without control characters."""
    return "".join(character if character.isprintable() else "⏎" if character == "\n" else " " for character in text)
