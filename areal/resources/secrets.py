"""Detection of environment variables that are secrets, by their name or their value. No I/O.

A manifest is recorded in clear text, so an expression must not read a secret. A name is judged by its words
(``API_KEY``, ``PGPASS``). A name whose last word describes something about a secret (``KEY_FILE``) is not a secret, nor
is the key of a column or the token of a text (``LABEL_KEY``, ``EOS_TOKEN``). A value is a secret if it has a form that
only secrets have: a password in a URL, a key with the prefix of a provider, a private key.
"""

from __future__ import annotations

import re
from itertools import pairwise

_ANYWHERE = re.compile(r"PASSWORD|PASSWD|PASSPHRASE|SECRET|CREDENTIAL|BEARER|APIKEY|ACCESSKEY|PRIVATEKEY|AUTHTOKEN")
_LAST_WORD = re.compile(r"PG\w*PASS|PASS|\w*PASSWD|PWD|AUTH|AUTHORIZATION|DSN|JWT|PAT|COOKIE|COOKIES|SAS|NETRC")
_ABOUT = re.compile("BUDGET|COLUMN|COUNT|DIR|FIELD|FILE|FOLDER|HEADER|LENGTH|LEVEL|LIMIT|LOSS|NAME|PATH|RATE|SIZE|TYPE")
_KEY_WORD = re.compile(r"(?!(?:DON|HOC|HOT|JOC|LAC|MON|TUR|TURN|WHIS)KEYS?$)\w*(?:KEY|KEYS|TOKEN)")
_ISSUER = re.compile("ACCESS|API|AUTH|BOT|GH|GITHUB|HF|REFRESH|SESSION|USER")
_OF_DATA = re.compile(  # keys of columns and metrics, tokens of a text
    "ANSWER|BOS|CACHE|CLS|COLUMN|END|EOS|FOREIGN|GROUP|IMAGE|INPUT|LABEL|LAST|MASK|MAX|METRIC|MIN|NEXT|NUM|OUTPUT|PAD"
    "|PARTITION|PER|PRIMARY|PROMPT|PUBLIC|REWARD|SEP|SORT|SPECIAL|START|STOP|TEXT|THINK|TOTAL|UNK"
)
_STORES = r"(?:DATABASE|DB|POSTGRES|POSTGRESQL|PG|MYSQL|MARIADB|MONGO|MONGODB|REDIS|AMQP|RABBITMQ|BROKER|SMTP)"
_CONNECTION = re.compile(rf"(?:.*_)?{_STORES}_(?:URL|URI|CONNECTION_STRING)")
_PLAIN = {"PWD", "OLDPWD"}  # the shell's working folders

_SECRET_VALUES = re.compile(
    r"""
      \b[a-z][a-z0-9+.-]*://[^/?\#\s@:]*:[^/?\#\s@]+@      # a URL with a password
    | \bhttps?://[^/?\#\s@]+@                              # git's form: the user is the token
    | -----BEGIN\ [A-Z ]*PRIVATE\ KEY-----
    | \b(?:sk|pk|rk)[-_](?=[\w-]*[0-9])(?=[\w-]*[A-Za-z0-9]{16}|[\w-]{40})[\w-]{16,}  # OpenAI, Anthropic, Stripe, areal
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
    if upper in _PLAIN or _ABOUT.fullmatch(words[-1]):
        return False
    if _ANYWHERE.search(upper) or _CONNECTION.fullmatch(upper) or _LAST_WORD.fullmatch(words[-1]):
        return True
    return any(_is_key(word, before) for before, word in pairwise(["", *words]))


def _is_key(word: str, before: str) -> bool:
    """Return whether a word of a name means an access key, given the word ``before`` it."""
    if word == "TOKENS":  # of a text, but for ``API_TOKENS``
        return _ISSUER.fullmatch(before) is not None
    return _KEY_WORD.fullmatch(word) is not None and not _OF_DATA.fullmatch(before)


def is_secret_value(value: str) -> bool:
    return _SECRET_VALUES.search(value) is not None
