"""Which environment variables look like secrets, by their name or their value. Pure.

A manifest is recorded in clear, so an expression must not read them. A name is judged by its words (``API_KEY``,
``PGPASS``); one whose last word says that it is about a secret (``KEY_FILE``) is none. A value is judged where it has a
form that only secrets have: a password in a URL, a key with a provider's prefix, a private key.
"""

from __future__ import annotations

import re

_ANYWHERE = re.compile(r"PASSWORD|PASSWD|PASSPHRASE|SECRET|CREDENTIAL|BEARER|APIKEY|ACCESSKEY|PRIVATEKEY|AUTHTOKEN")
_WORDS = {"KEY", "KEYS", "TOKEN"}
_LAST_WORD = re.compile(
    r"(?:.*(?:KEY|KEYS|TOKEN)|PG\w*PASS|PASS|\w*PASSWD|PWD|AUTH|AUTHORIZATION|DSN|JWT|PAT|COOKIE|COOKIES|SAS|NETRC)"
)
_ABOUT = {
    "FILE",
    "PATH",
    "DIR",
    "FOLDER",
    "NAME",
    "COLUMN",
    "FIELD",
    "COUNT",
    "SIZE",
    "LENGTH",
    "LIMIT",
    "TYPE",
    "HEADER",
}
_STORES = r"(?:DATABASE|DB|POSTGRES|POSTGRESQL|PG|MYSQL|MARIADB|MONGO|MONGODB|REDIS|AMQP|RABBITMQ|BROKER|SMTP)"
_CONNECTION = re.compile(rf"(?:.*_)?{_STORES}_(?:URL|URI|CONNECTION_STRING)")
_PLAIN = {"PWD", "OLDPWD"}  # the shell's working folders

_SECRET_VALUES = re.compile(
    r"""
      \b[a-z][a-z0-9+.-]*://[^/?\#\s@:]*:[^/?\#\s@]+@      # a URL with a password
    | \bhttps?://[^/?\#\s@]+@                              # git's form: the user is the token
    | -----BEGIN\ [A-Z ]*PRIVATE\ KEY-----
    | \b(?:sk|pk|rk)-[A-Za-z0-9_-]{16,}                    # OpenAI, Anthropic and this service
    | \b(?:ghp|gho|ghu|ghs|ghr|github_pat)_[A-Za-z0-9_]{20,}
    | \bglpat-[A-Za-z0-9_-]{16,}
    | \bhf_[A-Za-z0-9]{20,}
    | \bxox[abeoprs]-[A-Za-z0-9-]{10,}
    | \b(?:AKIA|ASIA)[A-Z0-9]{16}\b
    | \bAIza[A-Za-z0-9_-]{35}
    | \beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.     # a JSON web token
    | \b(?:Bearer|Basic)\ +(?=\S*[0-9=])[A-Za-z0-9+/=._~-]{8,}
    | (?i:\b(?:password|passwd|pwd|secret|token|api[_-]?key|accountkey|signature|sig)=[^\s&;]{6,})
    """,
    re.VERBOSE,
)


def is_secret_name(name: str) -> bool:
    upper = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).upper()
    words = re.sub(r"_?[0-9]+$", "", upper).split("_")
    if upper in _PLAIN or words[-1] in _ABOUT:
        return False
    if _ANYWHERE.search(upper) or _CONNECTION.fullmatch(upper) or _LAST_WORD.fullmatch(words[-1]):
        return True
    return not _WORDS.isdisjoint(words)


def is_secret_value(value: str) -> bool:
    return _SECRET_VALUES.search(value) is not None
