"""Route that cancels a running request by its id."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ...errors import InvalidRequest
from ..live_requests import LiveRequests
from .guard import caller_of


class RequestNotFound(InvalidRequest):
    """No live request has the id."""

    code = "request_not_found"
    http_status = 404
    grpc_status = "NOT_FOUND"


class RequestRoutes:
    """Routes about live requests."""

    def __init__(self, live: LiveRequests) -> None:
        self._live = live

    def router(self) -> APIRouter:
        router = APIRouter(tags=["generation"])
        path = "/v1/requests/{request_id:path}/cancel"
        router.add_api_route(path, self.cancel, methods=["POST"], summary="Cancel a running request")
        return router

    async def cancel(self, request_id: str, request: Request) -> Response:
        """Cancel the caller's requests with this id; an admin's reaches those of all keys. Raises RequestNotFound."""
        caller = caller_of(request.scope)
        if not self._live.cancel(request_id, caller.tenant_digest, all_tenants=caller.admin):
            raise RequestNotFound(
                f"no running request has the id '{request_id[:80]}': it has ended, or belongs to another API key",
                param="request_id",
            )
        body = msgspec.json.encode({"request_id": request_id, "status": "cancelled"})
        return Response(body, media_type="application/json")
