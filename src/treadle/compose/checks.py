"""Checks before anything is fetched or loaded: the installation and the settings."""

from __future__ import annotations

from ..config import Settings
from ..errors import StartFailed


def require_installed(model: str, *, gateway: bool = False) -> None:
    """Check that everything is installed that serving `model` needs, before anything is fetched or converted.

    Raises StartFailed with one command that installs all that is missing. `gateway`: the SMG gateway is needed too.
    """
    from .. import installation
    from ..models.resolve import missing_packages

    found = [installation.blocking_problem(), missing_packages(model)]
    if gateway:
        from ..fleet.plan import missing_gateway

        found.append(missing_gateway())
    if problems := [problem for problem in found if problem is not None]:
        raise StartFailed(installation.combine(problems))


def require_grpc() -> None:
    """Import the packages of the gRPC front. Generated code refuses a gRPC that is older than its generator. Raises
    StartFailed with the command that installs the right ones."""
    try:
        from grpc_health.v1 import health_pb2_grpc  # noqa: F401
        from grpc_reflection.v1alpha import reflection  # noqa: F401
        from smg_grpc_proto import mlx_engine_pb2_grpc, vllm_engine_pb2_grpc  # noqa: F401
    except Exception as error:
        from ..installation import diagnose_grpc

        raise StartFailed(str(diagnose_grpc(error))) from error


def check_cheaply(settings: Settings) -> None:
    """Check the settings as far as that needs no loading. Raises ModelError or ConfigError."""
    from ..models.resolve import check_named
    from ..text.folder import read_override

    check_named(settings)
    if settings.chat_template is not None:
        read_override(settings.chat_template)
