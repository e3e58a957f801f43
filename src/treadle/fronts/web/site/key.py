"""Response to an unauthenticated request; for a browser, a page that asks for the API key.

The page holds nothing of the server but its name. It keeps the key in the tab's sessionStorage, requests the same
address with `Authorization: Bearer KEY`, and shows the answer in its place.
"""

from __future__ import annotations

from starlette.types import Scope, Send

from ....errors import NotAuthenticated, TreadleError
from ..errors import headers_of, send_error, send_json
from .negotiate import wants_html
from .shell import HEADERS, HTML_TYPE, MARK, fill, page

KEY_PAGE = page("API key needed · Treadle", fill("key.html", mark=MARK), scripts=("common", "key")).encode()
_HEADERS = [(name.encode(), value.encode()) for name, value in HEADERS.items()]


async def refuse(scope: Scope, send: Send, error: TreadleError) -> None:
    """Send `error`: as the key page if a browser opens an address without a valid key, else as the envelope."""
    if isinstance(error, NotAuthenticated) and scope["method"] == "GET" and wants_html(scope):
        headers = [*headers_of(error), *_HEADERS]
        await send_json(send, error.http_status, KEY_PAGE, headers, content_type=HTML_TYPE.encode())
    else:
        await send_error(send, error, scope)
