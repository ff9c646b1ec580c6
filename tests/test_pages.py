"""The documentation pages quote code that exists and learns, and link to files that are there."""

import re
from pathlib import Path

import gymnasium as gym
import pytest
import torch

from benchmarks.bare import bare_ppo
from rl_modules.contract import Rollout
from tests.training import mean_return

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]


#: Pages that a command writes, and the two tables of another library's arguments, which are read by search.
LONG = {"results", "resume_compared", "concepts/one_batch", "how_to/from_sb3_arguments", "how_to/from_trl_arguments"}
LIMIT = 1500


def test_no_page_is_longer_than_the_limit():
    """Counts everything between blanks: code, tables and links too; tests/docs counts those of the notebooks."""
    docs = ROOT / "docs"
    words = {path.relative_to(docs).with_suffix("").as_posix(): len(path.read_text("utf-8").split())
             for path in docs.rglob("*.md")}  # fmt: skip
    assert set(words) >= LONG
    assert {name: count for name, count in words.items() if count > LIMIT and name not in LONG} == {}


def test_the_page_quotes_the_whole_file():
    page = (ROOT / "docs/ppo_in_one_page.md").read_text(encoding="utf-8")
    quoted = "\n".join(re.findall(r"```python\n(.*?)\n```", page, re.DOTALL))
    # Blank lines between two parts of the file stand outside of the blocks.
    code = (ROOT / "benchmarks/bare.py").read_text(encoding="utf-8")
    assert [line for line in quoted.splitlines() if line] == [line for line in code.splitlines() if line]


class Greedy:
    """The bare policy with the signature that evaluation calls."""

    def __init__(self, policy: torch.nn.Module) -> None:
        self.policy = policy

    def predict(self, observation, deterministic):
        with torch.no_grad():
            return int(self.policy(torch.from_numpy(observation)).argmax()), None


@pytest.mark.long
def test_the_loop_learns_cartpole():
    env = gym.make("CartPole-v1")
    untrained, trained = (mean_return(Greedy(bare_ppo(total, seed=0)), env, n_episodes=10) for total in (256, 10_240))
    assert untrained < 60
    assert trained > 150


def leads_somewhere(page: str, link: str) -> bool:
    """Whether a page's link has a target; the site makes a page of each notebook of the field guide."""
    target = (ROOT / page).parent.joinpath(link).resolve()
    on_the_site = page.startswith("docs/") and target.match("docs/ladder/*.md")
    return target.exists() or (on_the_site and target.with_suffix(".ipynb").exists())


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if not link.startswith("http")]
    assert [link for link in links if not leads_somewhere(page, link)] == []


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_are_there(page):
    named = re.findall(r"`((?:rl_modules|datamodules|recipes|configs|benchmarks|docs|tests)/[\w./-]+)`",
                       (ROOT / page).read_text(encoding="utf-8"))  # fmt: skip
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_architecture_page_lists_every_field_of_a_rollout():
    section = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").split("## A rollout's fields")[1]
    table = "\n".join(line.split("|")[1] for line in section.split("\n## ")[0].splitlines() if line.startswith("| `"))
    assert set(Rollout.__annotations__) - set(re.findall(r"`(\w+)`", table)) == {"log_prob"}  # named as an example
    assert "`log_prob`" in section


@pytest.mark.parametrize("page", PAGES)
def test_tables_begin_a_paragraph_and_have_equal_rows(page):
    # A table that is glued to a sentence is drawn as one line of bars.
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = ["", *re.sub(r"```.*?```", "", text, flags=re.DOTALL).splitlines()]
    for above, head, ruler in zip(lines, lines[1:], lines[2:], strict=False):
        if re.fullmatch(r"\|[\s:|-]*-{3}[\s:|-]*\|", ruler):
            assert head.startswith("|") and not above.strip(), head
            assert head.count("|") == ruler.count("|"), head
