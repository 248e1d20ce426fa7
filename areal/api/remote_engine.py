"""AReaL's ``RemoteSGLangEngine.as_controller``, with which a driver uses a second server, such as a judge.

Here the configuration names the address of a running server (``gateway_addr``): an InferenceService, or any server with
OpenAI's API. No server is started or stopped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Self

from areal.errors import UsageFault

if TYPE_CHECKING:
    from areal.api.config.rollout import InferenceEngineConfig


class RemoteEngineController:
    """A client of the given server. ``proxy_gateway_addr``: its base URL."""

    def __init__(self, address: str) -> None:
        self.proxy_gateway_addr = address

    def initialize(self, *_: Any, **__: Any) -> None:
        """Do nothing: the server already runs. AReaL's method starts it."""

    start_proxy = start_proxy_gateway = destroy = initialize


class RemoteSGLangEngine:
    """The constructor raises UsageFault, because an InferenceService runs the engines."""

    def __init__(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageFault(
            "RemoteSGLangEngine is not supported: an InferenceService runs the engines",
            hint="areal.client.RolloutController samples from it",
        )

    @classmethod
    def as_controller(
        cls: type[Self], config: InferenceEngineConfig, scheduler: object = None
    ) -> RemoteEngineController:
        """Return a client of the configured server. Raises UsageFault if no address is given."""
        if not config.gateway_addr:
            raise UsageFault(
                f"the server of {config.backend or 'a second engine'} is not given: a driver starts only its own",
                hint="gateway_addr=http://HOST:PORT in its section, of a server that is running",
            )
        return RemoteEngineController(config.gateway_addr)
