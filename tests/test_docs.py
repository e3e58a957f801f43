"""The README and the documents: links lead somewhere, and command lines are ones that the command takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command

from treadle.cli.app import app

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^```(?:sh|console)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINKS = (re.compile(r"\]\(([^()\s]+)\)"), re.compile(r'(?:src|srcset|href)="([^"\s]+)"'))
SHELLS_AND_HELP = ("--help", "--install-completion", "--show-completion")
BEFORE = re.compile(r"\$|[A-Z_]+=.*|sudo|caffeinate|-i")


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def links(page: Path) -> list[str]:
    """The relative links of a page, with their anchors."""
    text = CODE.sub("", prose(page))
    found = [match for pattern in LINKS for match in pattern.findall(text)]
    return [link for link in found if "://" not in link and not link.startswith("mailto:")]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as hosts of Markdown make them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?) *$", prose(page), re.MULTILINE):
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        number = next(i for i in range(len(found) + 1) if (f"{anchor}-{i}" if i else anchor) not in found)
        found.add(f"{anchor}-{number}" if number else anchor)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_and_anchors_lead_somewhere(page: Path) -> None:
    broken = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_tests_have_their_names(page: Path) -> None:
    named = re.findall(r"\[(test_\w+)\]\([^()\s]*?(\w+)\.py\)", prose(page))
    assert [label for label, file in named if label != file] == []


def commands(page: Path) -> list[list[str]]:
    """The arguments of each `treadle` command line in a page's shell blocks."""
    blocks = SHELL.findall(page.read_text(encoding="utf-8"))
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [words for line in lines if (words := arguments(line))]


def mentions(page: Path) -> list[list[str]]:
    """The same between backticks in a page's text, where they name a command and its options."""
    spans = [span.strip("`") for span in CODE.findall(prose(page))]
    return [words for span in spans if (words := arguments(re.sub(r"[\[\]]", " ", span)))]


def arguments(line: str) -> list[str]:
    """What follows `treadle` in a command line, up to a pipe or another command; nothing where it is not run there."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&<>")
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:  # a quote that goes on in the next line
        return []
    while words and BEFORE.fullmatch(words[0]):
        del words[0]
    if not words or words[0].rpartition("/")[2] != "treadle":
        return []
    end = next((i for i, word in enumerate(words) if set(word) <= set(";|&<>")), len(words))
    return [word for word in words[1:end] if word != "..."]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_command_lines_are_ones_that_the_command_takes(page: Path) -> None:
    wrong = {f"treadle {' '.join(words)}": error for words in commands(page) if (error := refusal(words))}
    wrong |= {f"treadle {' '.join(words)}": error for words in mentions(page) if (error := unknown(words))}
    assert not wrong


def refusal(words: list[str]) -> str:
    """What the command line would end with, parsed and not run."""
    command, rest = found(words)
    workers = rest[rest.index("--") + 1 :] if command.name == "fleet" and "--" in rest else []
    try:
        command.make_context(command.name, list(rest))
    except typer.Exit:  # --help, --version
        return ""
    except Exception as error:
        return str(error)
    return refusal(["serve", *workers]) if workers else ""


def unknown(words: list[str]) -> str:
    """The options that no such command has."""
    command, rest = found(words)
    options = [word.partition("=")[0] for word in (rest[: rest.index("--")] if "--" in rest else rest)]
    known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)} | {"--help", "-h"}
    return " ".join(option for option in options if option.startswith("-") and option not in known)


def found(words: list[str]) -> tuple[Any, list[str]]:
    """The command that the words name, and its arguments."""
    command: Any = get_command(app)
    rest = list(words)
    while rest and rest[0] in getattr(command, "commands", {}):
        command = command.commands[rest.pop(0)]
    return command, rest


def test_a_wrong_option_and_a_wrong_anchor_would_be_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One thing\n\n[a](#one-thing) [b](#another) [c](gone.md)\n\n```\ntreadle serve --no-such 1\n```\n"
    )
    assert [link for link in links(page) if link.removeprefix("#") not in anchors(page)] == ["#another", "gone.md"]
    assert commands(page) == [["serve", "--no-such", "1"]]
    assert "no-such" in refusal(commands(page)[0])
    assert unknown(["serve", "--port", "--no-such"]) == "--no-such"
    assert not refusal(["serve", "demo", "--port", "1"])


def options() -> list[tuple[str, str]]:
    """Each option of each command, with the command's name."""
    listed, todo = [], [("treadle", get_command(app))]
    while todo:
        name, command = todo.pop()
        todo += [(f"{name} {child}", one) for child, one in getattr(command, "commands", {}).items()]
        flags = [flag for param in command.params for flag in param.opts if flag.startswith("--")]
        listed += [(name, flag) for flag in flags if flag not in SHELLS_AND_HELP]
    return listed


def test_every_option_is_in_the_documents() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    documented = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))
    assert [(name, flag) for name, flag in options() if flag not in documented] == []
