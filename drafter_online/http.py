"""The daemon over HTTP: health, status, versions and metrics.

    GET /healthz     200 while both threads live and no step hangs, else 503 and what does not
    GET /status      everything, as JSON                GET /metrics     the same for Prometheus
    GET /versions    what is in the store               POST /versions/{v}/promote|rollback

On loopback it answers without a token unless one is set; elsewhere a token is required. With a token, all but
/healthz need `Authorization: Bearer TOKEN`. What changes something is refused to pages of other origins, and on
loopback only loopback names are answered to, so that no web page that its reader has open can drive the daemon.
"""

from __future__ import annotations

import hmac
import socket
import threading
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from drafter_online import wire
from drafter_online.errors import DrafterError, ServiceError
from drafter_online.files import oserror_as
from drafter_online.service import Service
from drafter_online.status import Collector, list_versions, status

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


def build(service: Service, *, token: str | None = None, local: bool = True) -> Any:
    """The FastAPI application.

    Args:
        token: required of callers, None where every caller that reaches it may call.
        local: whether only this machine reaches it.
    """
    app = FastAPI(title="drafter-online", docs_url=None, redoc_url=None, openapi_url=None)
    registry = CollectorRegistry()
    registry.register(Collector(service))

    def allowed(request: Request) -> None:
        # A name that was made to point at this machine is how another page would read what only this machine may.
        if local and request.url.hostname not in LOCAL_NAMES:
            raise HTTPException(400, f"drafter-online: use one of {', '.join(LOCAL_NAMES)} as the host.")
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if token is not None and not hmac.compare_digest(given.encode(), token.encode()):
            raise HTTPException(401, "drafter-online: send the daemon's token as `Authorization: Bearer TOKEN`.")

    def here(request: Request) -> None:
        origin = request.headers.get("origin")
        if origin is not None and origin.rpartition("://")[2] != request.headers.get("host"):
            raise HTTPException(403, f"drafter-online: pages of {origin} must not change anything here.")

    guarded, changing = [Depends(allowed)], [Depends(allowed), Depends(here)]

    @app.exception_handler(DrafterError)
    async def refused(request: Request, error: DrafterError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, status_code=409)

    @app.get("/healthz")
    def health() -> JSONResponse:
        good, what = service.healthy()
        return JSONResponse({"healthy": good, "detail": what}, status_code=200 if good else 503)

    @app.get("/status", dependencies=guarded)
    def status_() -> Any:
        return status(service)

    @app.get("/versions", dependencies=guarded)
    def versions() -> Any:
        return list_versions(service.versions, service.release.current)

    @app.get("/metrics", dependencies=guarded)
    def metrics() -> PlainTextResponse:
        return PlainTextResponse(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.post("/versions/{number}/promote", dependencies=changing)
    def promote(number: int) -> Any:
        return {"version": number, "promoted": True, "runs_as": service.release.promote(number)}

    @app.post("/versions/{number}/rollback", dependencies=changing)
    def rollback(number: int) -> Any:
        return {"version": number, "rolled_back": True, "runs_as": service.release.rollback(number)}

    return app


class HttpServer:
    """Serves the application on a thread.

    Raises:
        DrafterError: the port is taken, or the address needs a token.
    """

    def __init__(self, service: Service, host: str, port: int, token: str | None = None) -> None:
        wire.check_endpoint(host, token)
        with oserror_as(
            ServiceError, f"metrics cannot be served at {host}:{port}", "give another --port, or 0 for any"
        ):
            self._socket = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"
        app = build(service, token=token, local=wire.is_local(host))
        config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_keep_alive=5)
        self._server = uvicorn.Server(config)
        # uvicorn installs signal handlers in the main thread only, so these stay the daemon's.
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="drafter-http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.should_exit = True
        self._thread.join(5)
        self._socket.close()
