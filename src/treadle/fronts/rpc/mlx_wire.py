"""`mlx.grpc.engine.MlxEngine`: the gateway's wire for MLX workers, with tokens in and tokens out."""

from __future__ import annotations

from smg_grpc_proto import mlx_engine_pb2, mlx_engine_pb2_grpc

from .service import EngineService

SERVICE = "mlx.grpc.engine.MlxEngine"


class MlxEngine(EngineService, mlx_engine_pb2_grpc.MlxEngineServicer):  # type: ignore[misc]
    """The service: the calls and fields that both wires have."""

    name = SERVICE
    messages = mlx_engine_pb2
