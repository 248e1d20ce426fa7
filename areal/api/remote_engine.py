"""AReaL's ``RemoteSGLangEngine.as_controller``, by which a driver has a second server beside its trainer's, as a judge.

Here that server is given by its address (``gateway_addr`` of its configuration): an InferenceService, or any server of
OpenAI's API. Nothing is started or ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Self

from areal.errors import UsageFault

if TYPE_CHECKING:
    from areal.api.config.rollout import InferenceEngineConfig


class RemoteEngineController:
    """``proxy_gateway_addr``: the base URL of the given server."""

    def __init__(self, address: str) -> None:
        self.proxy_gateway_addr = address

    def initialize(self, *_: Any, **__: Any) -> None:
        """AReaL's starts the server."""

    start_proxy = start_proxy_gateway = destroy = initialize


class RemoteSGLangEngine:
    """Raises UsageFault when constructed: engines are run by an InferenceService."""

    def __init__(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageFault(
            "RemoteSGLangEngine is not supported: an InferenceService runs the engines",
            hint="areal.client.RolloutController samples from it",
        )

    @classmethod
    def as_controller(
        cls: type[Self], config: InferenceEngineConfig, scheduler: object = None
    ) -> RemoteEngineController:
        """Raise UsageFault where no server is given."""
        if not config.gateway_addr:
            raise UsageFault(
                f"the server of {config.backend or 'a second engine'} is not given: a driver starts only its own",
                hint="gateway_addr=http://HOST:PORT in its section, of a server that is running",
            )
        return RemoteEngineController(config.gateway_addr)
