"""The field guide's text has no measured number that its page does not print."""

import json
import re
from pathlib import Path

import pytest

LADDER = Path(__file__).parents[2] / "docs/ladder"
NOTEBOOKS = sorted(LADDER.glob("[0-9][0-9]*_*.ipynb"))
#: Numbers that no cell of a page has, and where they come from.
EXCEPTIONS = {
    "03_sarsa": {"100": "Gymnasium's CliffWalking-v1: a step into the cliff has the reward -100"},
    "05_dqn": {"200": "the plot of the returns", "40": "0.1 / 2.3e-3, the two step sizes"},
    "06_reinforce": {"2,048": "8 environments, 256 steps", "20": "0.1 / 5e-3, the two step sizes"},
    "07_a2c": {"40": "8 environments, 5 steps", "3,750": "150,000 / 40"},
    "07b_traces": {"19": "places 1 to 19 of the code", "-0.9": "true_value of the code"},
    "08_trpo": {
        "40,000": "4 γ / (1 - γ)² at γ = 0.99",
        "0.8": "TRPO's default line_search_shrinking_factor",
        "49": "100,000 transitions, 4 environments, 512 steps",
    },
    "10_reward_model": {"7.4": "e²", "8.4": "e² + 1", "18": "9 + 9", "0.7 %": "√(0.955 · 0.045 / 1,000)"},
    "12_grpo": {"0.012": "0.01 · 1.2", "0.6": "0.5 · 1.2", "6,400": "100 prompts, 64 samples of each"},
    "14_distillation": {"30": "the plot of the returns", "1.2": "the plot of the KL", "1000": "0.999 / 0.001"},
}
#: What is no measured number: code, equations, links, headings, exercises (their asserts check them), sources, names of
#: pages and years, list markers.
_IGNORED = (
    r"(?s)```.*?```",
    r"`[^`]*`",
    r"(?s)\$\$.*?\$\$",
    r"\$[^$]*\$",
    r"(?s)\*\*Exercise.*?</details>",
    r"(?s)\*\*Sources\.\*\*.*",
    r"(?s)\*\*Before:\*\*.*?\n\n",
    r"\[arXiv[^\]]*\]",
    r"\]\([^)]*\)",
    r"(?m)^#+ .*$",
    r"(?m)^\| \d+\w?(?:, \d+\w?)* \|",
    r"(?:[Pp]ages?|[Ee]q\.|[Ss]ection|[Tt]heorem|[Ss]eeds?)\s\d+\w?(?:(?:,|\sand|–|\sto)\s?\d+\w?)*",
    r"(?m)^ *\d+\. ",
    r"\(?\b(?:19|20)\d\d\)?",
)
_NUMBER = re.compile(r"(?<![\w.,/-])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e-?\d+)?(?![\w/-]|[.,]\d)(?:\s?%)?")


def value(number):
    """A number of a text."""
    return float(number.rstrip("% \n").replace(",", ""))


def is_known(number, known):
    """Whether some known value is this number, or rounds to it where it has decimals or is a percentage."""
    wanted, decimals = value(number), len(number.rstrip("% \n").partition(".")[2])
    if number.endswith("%"):
        return any(round(100 * x, decimals) == wanted or x == wanted for x in known)
    return any(x == wanted or (decimals and round(x, decimals) == wanted) for x in known)


def unknown_numbers(cells):
    """The numbers of a page's text that neither the code of its cells nor what they print has; whole ones to ten are
    words.
    """
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    for pattern in _IGNORED:
        text = re.sub(pattern, " ", text)
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    printed = ["".join(output.get("text", "")) for cell in code for output in cell["outputs"]]
    shown = "\n".join(["".join(cell["source"]) for cell in code] + printed)
    shown = re.sub(r"(?<=\d)[_,](?=\d{3}(?!\d))", "", shown)
    known = [float(x) for x in re.findall(r"-?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?", shown)]
    found = [number for number in _NUMBER.findall(text) if not re.fullmatch(r"-?(?:\d|10)", number)]
    return {number for number in found if not is_known(number, known)}


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_a_cell_has_every_number_of_the_text(notebook):
    cells = json.loads(notebook.read_text("utf-8"))["cells"]
    assert unknown_numbers(cells) == EXCEPTIONS.get(notebook.stem, {}).keys()


def test_a_number_that_no_cell_has_is_found():
    text = {"cell_type": "markdown", "source": ["Of 1,000 walks (page 12) 96 % end at 9.84 or 0.57, as $0.3$, not -7."]}
    run = {"cell_type": "code", "source": ["n = 1_000"], "outputs": [{"text": ["share 0.9613, return 9.838"]}]}
    assert unknown_numbers([text, run]) == {"0.57"}
    assert unknown_numbers([text]) == {"1,000", "96 %", "9.84", "0.57"}
