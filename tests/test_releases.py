"""The files that describe a release agree with each other."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = (ROOT / "pyproject.toml").read_text("utf-8")


def bounds() -> dict[str, str]:
    """Lower bounds in pyproject.toml by distribution."""
    return dict(re.findall(r'"([\w-]+)(?:\[\w+\])?>=([\d.]+)', PROJECT))


def test_one_version_everywhere():
    version = re.search(r'^version = "(.+)"', PROJECT, re.MULTILINE)[1]
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert next(heading for heading in headings if heading != "Unreleased") == version


def test_the_lower_bounds_are_those_of_the_project():
    pinned = dict(re.findall(r"^([\w-]+)==([\d.]+)", (ROOT / "constraints-min.txt").read_text("utf-8"), re.MULTILINE))
    declared = bounds()
    for name, version in pinned.items():
        wanted = declared[name]
        assert version == wanted or version.startswith(f"{wanted}."), f"{name}: {version} is not {wanted}"
    needed = re.search(r"^dependencies = \[(.*?)^\]", PROJECT, re.DOTALL | re.MULTILINE)[1]
    assert set(re.findall(r'^\s+"([\w-]+)', needed, re.MULTILINE)) <= set(pinned)


def test_every_package_of_the_tests_has_a_lower_bound_in_the_constraints():
    pinned = re.findall(r"^([\w-]+)==", (ROOT / "constraints-min.txt").read_text("utf-8"), re.MULTILINE)
    tests, video, sweep = (extra(name) for name in ("test-lean", "video", "sweep"))
    packages = {re.match(r"[\w-]+", requirement)[0] for requirement in (*tests, *video, *sweep)}
    assert packages - {"lightning-rl-recipes", "ruff", "mypy"} <= set(pinned)


def extra(name: str) -> list[str]:
    """Requirements of an extra in pyproject.toml."""
    (text,) = re.findall(rf"^{name} = \[(.*?)\](?:$|  #)", PROJECT, re.DOTALL | re.MULTILINE)
    return re.findall(r'"([^"]+)"', text)


def test_the_command_that_installs_an_extra_names_what_the_project_declares():
    from rl_modules.common.extras import PACKAGES

    for name, requirements in PACKAGES.items():
        assert list(requirements) == extra(name), name


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the pinned versions are those of Python 3.11")
def test_the_pinned_versions_are_not_below_the_bounds():
    pinned = dict(re.findall(r"^([\w-]+)==([\d.]+)", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE))
    for name, version in bounds().items():
        if name in pinned:
            here, lowest = ([int(part) for part in text.split(".")] for text in (pinned[name], version))
            assert here >= lowest, name
