"""The data proxy's flags."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from areal.errors import UsageFault
from areal.resources.external_url import ExternalUrl, UrlError, parse_external_url
from areal.services.inference.data_proxy.keeping import add_keeping_arguments
from areal.services.inference.engines.clients import TOKEN_ENGINES
from areal.services.inference.engines.clients.dialect import Dialect
from areal.services.web.body import DEFAULT_MAX_BODY_BYTES
from areal.services.web.options import add_serve_arguments

PROVIDER_KEY_VARIABLE = "AREAL_PROVIDER_API_KEY"
ENGINE_KEY_VARIABLE = "AREAL_ENGINE_API_KEY"


def data_proxy_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="areal-inference-data-proxy")
    add_serve_arguments(parser, port=8082)
    parser.add_argument("--model", required=True, help="the name under which callers know the model")
    parser.add_argument("--engine", required=True, choices=[*TOKEN_ENGINES, "external"])
    parser.add_argument("--engine-url", required=True, help="for external: the API's base URL, with its /v1")
    parser.add_argument("--attached", action="store_true", help="the engine is not ours: it is sent no key of ours")
    parser.add_argument("--engine-key-file", help=f"--attached: file with its key (else ${ENGINE_KEY_VARIABLE})")
    parser.add_argument("--provider-model", help="external: the provider's name of the model (default: --model)")
    parser.add_argument("--provider-key-file", help=f"external: file with its key (else ${PROVIDER_KEY_VARIABLE})")
    parser.add_argument(
        "--provider-api", choices=[*Dialect], default=Dialect.OPENAI, type=Dialect, help="external: whose API it is"
    )
    parser.add_argument("--allow-private", action="store_true", help="external: the URL may lead to a private address")
    parser.add_argument("--model-path", help="what the engine starts with: weights published for another are not taken")
    parser.add_argument("--tokenizer-path", help="folder with tokenizer.json, or an id of the hub")
    parser.add_argument("--chat-template", help="file with a chat template, instead of the tokenizer folder's")
    parser.add_argument("--tool-call-parser", help="how tool calls are written (default: as the template shows; none)")
    parser.add_argument("--reasoning-parser", help="how reasoning is told from the answer (default: it is not)")
    parser.add_argument("--max-model-len", type=int, help="context in tokens, where the engine does not say")
    parser.add_argument("--max-body-bytes", type=int, default=DEFAULT_MAX_BODY_BYTES)
    parser.add_argument("--request-timeout", type=float, default=600.0, help="seconds without progress")
    parser.add_argument("--tokenizer-threads", type=int, default=2)
    parser.add_argument("--registration", help="JSON: how it registers itself at its router (default: not at all)")
    add_keeping_arguments(parser)
    return parser


def others_key(key_file: str | None, variable: str) -> str | None:
    """The key that somebody else's server wants, of the file or else the environment. Raises UsageFault."""
    if key_file is None:
        key, source = os.environ.get(variable, ""), f"${variable}"
    else:
        source = f"the key file {key_file}"
        try:
            key = Path(key_file).read_text(encoding="ascii").strip()
        except (OSError, ValueError) as error:
            raise UsageFault(f"cannot read {source}: {error}") from error
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise UsageFault(f"{source} holds more than a key")
    return key or None


def attached_headers(key_file: str | None) -> dict[str, str]:
    """What an engine that is not ours is sent. Raises UsageFault."""
    key = others_key(key_file, ENGINE_KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


def external_url(text: str, *, allow_private: bool = False) -> ExternalUrl:
    """The API's base URL. Raises UsageFault."""
    try:
        return parse_external_url(text, allow_private=allow_private)
    except UrlError as error:
        raise UsageFault(f"--engine-url {text!r} {error}") from error
