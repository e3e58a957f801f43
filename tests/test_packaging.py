"""What a package index shows, and what an installation gets: pyproject.toml, README.md, constraints.txt, and the
versions of the clients that the tests run."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import treadle

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
README_HOOK = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
LINK = re.compile(r"\[[^\[\]]*\]\(([^()\s]+)\)")


def on_an_index(text: str) -> str:
    """The README as the build writes it into the package."""
    for substitution in README_HOOK["substitutions"]:
        text = re.sub(substitution["pattern"], substitution["replacement"], text)
    return text


def test_the_packages_readme_links_to_nothing_that_an_index_does_not_have() -> None:
    text = on_an_index((ROOT / "README.md").read_text(encoding="utf-8"))
    links = [*LINK.findall(text), *re.findall(r'(?:src|srcset|href)="([^"]*)"', text)]
    assert [link for link in links if not link.startswith(("https://", "#"))] == []


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("see [the docs](docs/api.md), [MLX](https://x.org/a)", "see the docs, [MLX](https://x.org/a)"),
        ("![two plots](docs/a.svg) and ![b](https://x.org/b.png)", "two plots and ![b](https://x.org/b.png)"),
        ("[![plot](a.png)](docs/a.md#part)", "plot"),
        ('a\n\n<picture>\n  <img src="docs/a.png">\n</picture>\n\nb', "a\n\nb"),
        ("[below](#start) [mail](mailto:a@b.c)", "[below](#start) [mail](mailto:a@b.c)"),
    ],
)
def test_relative_links_become_their_text(written: str, shown: str) -> None:
    assert on_an_index(written) == shown


def test_the_version_has_one_source() -> None:
    assert treadle.__version__ == metadata.version("treadle")
    assert not list((ROOT / "src").rglob("_version.py"))


def test_types_are_shipped() -> None:
    assert (Path(treadle.__file__).parent / "py.typed").is_file()


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = dict(line.split("==") for line in lines)
    assert len(found) == len(lines)
    return {canonicalize_name(name): version for name, version in found.items()}


def test_constraints_are_exact_versions_in_order() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").lower().splitlines()
    assert lines == sorted(lines)
    assert all(re.fullmatch(r"\d[0-9a-z.]*", version) for version in constraints().values())


def needed(wanted: list[str], seen: set[str]) -> Iterator[str]:
    """The names of all packages that `wanted` need here, themselves included, as far as they are installed."""
    for line in wanted:
        one = Requirement(line)
        name = canonicalize_name(one.name)
        if f"{name}[{sorted(one.extras)}]" in seen:
            continue
        seen.add(f"{name}[{sorted(one.extras)}]")
        yield name
        try:
            requires = metadata.requires(one.name) or []
        except metadata.PackageNotFoundError:
            continue
        own = [Requirement(one) for one in requires]
        extras = one.extras or {""}
        below = [r for r in own if r.marker is None or any(r.marker.evaluate({"extra": extra}) for extra in extras)]
        for requirement in below:
            requirement.marker = None
        yield from needed([str(requirement) for requirement in below], seen)


def test_constraints_name_everything_that_make_installs() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    lines = [*PROJECT["project"]["dependencies"], *extras["cpu"], *extras["demo"], *extras["fleet"], *extras["dev"]]
    here = [line for line in lines if (marker := Requirement(line).marker) is None or marker.evaluate()]
    assert sorted(set(needed(here, set())) - constraints().keys()) == []


def test_requirements_admit_what_constraints_pin() -> None:
    pinned = constraints()
    extras = PROJECT["project"]["optional-dependencies"]
    for line in [*PROJECT["project"]["dependencies"], *(one for lines in extras.values() for one in lines)]:
        requirement = Requirement(line)
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), line


def locked(backend: str) -> dict[str, list[str]]:
    """Of each package in a release's requirements: its version, marker and hashes."""
    text = (ROOT / "deploy" / f"requirements-{backend}.txt").read_text(encoding="utf-8")
    found: dict[str, list[str]] = {}
    for line in text.replace("\\\n", " ").splitlines():
        pin, *hashes = re.split(r"\s+--hash=sha256:", line)
        name, _, version = pin.partition("==")
        found[canonicalize_name(name)] = [version.partition(";")[0].strip(), *hashes]
    return found


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_a_release_is_installed_by_hash_and_in_the_versions_that_are_tested(backend: str) -> None:
    pinned = constraints()
    for name, (version, *hashes) in locked(backend).items():
        assert version == pinned[name], name
        assert hashes, name
        assert all(re.fullmatch("[0-9a-f]{64}", one.strip()) for one in hashes), name


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_a_release_names_everything_that_serving_needs(backend: str) -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    lines = [*PROJECT["project"]["dependencies"], *extras[backend], *extras["demo"]]
    here = [line for line in lines if (marker := Requirement(line).marker) is None or marker.evaluate()]
    of_images = {canonicalize_name(Requirement(line).name) for line in extras["vision"]}
    assert sorted({*needed(here, set()), *of_images} - locked(backend).keys()) == []


def test_the_tools_of_a_release_are_pinned() -> None:
    tools = (ROOT / "deploy" / "release-tools.txt").read_text(encoding="utf-8").splitlines()
    assert all(re.fullmatch(r"[a-z-]+==\d[0-9.]*", line) for line in tools)


CLIENTS = ROOT / "benchmarks" / "clients"


def client_pins() -> dict[str, str]:
    lines = (CLIENTS / "requirements.txt").read_text(encoding="utf-8").splitlines()
    requirements = [Requirement(line) for line in lines]
    return {canonicalize_name(one.name): str(one.specifier) for one in requirements}


def test_the_clients_that_the_tests_run_are_pinned() -> None:
    pins = client_pins()
    assert all(re.fullmatch(r"==\d[0-9a-z.]*", pin) for pin in pins.values())
    lines = (CLIENTS / "requirements.in").read_text(encoding="utf-8").splitlines()
    named = [Requirement(text) for line in lines if (text := line.partition("#")[0].strip())]
    assert named
    assert all(one.specifier.contains(pins[canonicalize_name(one.name)].removeprefix("==")) for one in named)


def test_the_javascript_clients_are_locked_by_hash_and_name_no_registry() -> None:
    wanted = json.loads((CLIENTS / "package.json").read_text(encoding="utf-8"))["dependencies"]
    text = (CLIENTS / "package-lock.json").read_text(encoding="utf-8")
    packages = json.loads(text)["packages"]
    assert "://" not in text
    assert packages.pop("")["dependencies"] == wanted
    assert all(packages[f"node_modules/{name}"]["version"] == version for name, version in wanted.items())
    assert all(one["integrity"].startswith("sha512-") for one in packages.values())
