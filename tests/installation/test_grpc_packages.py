"""What keeps gRPC from being imported, and what mends it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.packages import Packages
from treadle.installation import diagnose_grpc

OLD = RuntimeError("The grpc package installed is at version 1.60.0, but the generated code ...")
INSTALLED = {
    "grpcio": "1.81.1",
    "grpcio-health-checking": "1.85.1",
    "grpcio-reflection": "1.85.1",
    "smg-grpc-proto": "0.4.28",
}


def install(packages: Packages, **versions: str | None) -> None:
    """The packages of gRPC, some of them in another version, or not at all."""
    packages.treadle()
    others = {name.replace("_", "-"): version for name, version in versions.items()}
    for name, version in (INSTALLED | others).items():
        if version is not None:
            packages.add(name, version)


@pytest.mark.parametrize(
    ("name", "version", "said"),
    [
        ("grpcio", "1.60.0", "grpcio 1.60.0 is installed and Treadle needs >=1.81.1: pip install 'grpcio>=1.81.1'"),
        ("grpcio_reflection", None, "grpcio-reflection is not installed: pip install 'grpcio-reflection>=1.81.1'"),
        (
            "smg_grpc_proto",
            "0.5.1",
            "smg-grpc-proto 0.5.1 is installed and Treadle needs <0.5,>=0.4.28: "
            "pip install 'smg-grpc-proto<0.5,>=0.4.28'",
        ),
    ],
)
def test_a_package_that_does_not_fit_is_named_with_its_cure(
    packages: Packages, environment: Path, name: str, version: str | None, said: str
) -> None:
    install(packages, **{name: version})
    assert str(diagnose_grpc(OLD)) == said


def test_other_causes_are_told_in_one_line_with_a_cure_for_most(packages: Packages, environment: Path) -> None:
    """As a protobuf that is too old for the generated code."""
    install(packages)
    what, _, fix = str(diagnose_grpc(ImportError("runtime 5.29\n is older"))).partition("): ")
    assert what == "gRPC can't be imported (runtime 5.29 is older"
    assert fix.startswith("pip install --upgrade protobuf 'grpcio>=1.81.1'")
