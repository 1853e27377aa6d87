"""The prefix under which a proxy shows this service, whether the proxy takes it off or not. Runs in the API process."""

from starlette.types import ASGIApp, Receive, Scope, Send


class Prefix:
    """ASGI layer: tells the app where it is mounted, as the ASGI specification has it."""

    def __init__(self, app: ASGIApp, root: str) -> None:
        self._app = app
        self._root = root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app under its prefix."""
        if scope["type"] == "http" and self._root:
            path = scope["path"]
            whole = path if path.startswith(f"{self._root}/") else self._root + path
            scope = {**scope, "root_path": self._root, "path": whole}
        await self._app(scope, receive, send)


def path_of(scope: Scope) -> str:
    """The path below the prefix."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path
