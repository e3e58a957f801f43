"""`mlx.grpc.engine.MlxEngine`: the wire that the gateway speaks to MLX workers. Tokens in, tokens out."""

from __future__ import annotations

from smg_grpc_proto import mlx_engine_pb2, mlx_engine_pb2_grpc

from .service import EngineService

SERVICE = "mlx.grpc.engine.MlxEngine"


class MlxEngine(EngineService, mlx_engine_pb2_grpc.MlxEngineServicer):  # type: ignore[misc]
    """The service: all that both wires have, and no more."""

    name = SERVICE
    messages = mlx_engine_pb2
