"""Environment variables that an expression must not read, by name and by value."""

from __future__ import annotations

import pytest

from areal.resources.secrets import is_secret_name, is_secret_value

SECRET_NAMES = [
    "OPENAI_API_KEY",
    "API_KEY",
    "KEY",
    "apiKey",
    "OPENAI_API_KEY_2",
    "OPENAI_API_KEY_PROD",
    "HF_TOKEN",
    "HFTOKEN",
    "githubToken",
    "TOKEN",
    "WANDB_API_KEY",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_ACCESS_KEY_ID",
    "VAULT_SECRET_ID",
    "CLIENT_SECRET",
    "DJANGO_SECRET",
    "PGPASS",
    "PGPASSWORD",
    "DB_PASS",
    "SMTP_PASS",
    "MYSQL_PWD",
    "MYSQL_ROOT_PASSWORD",
    "PASSWD",
    "SSH_PASSPHRASE",
    "GOOGLE_CREDENTIALS",
    "CREDENTIAL",
    "BEARER",
    "HTTP_BEARER",
    "BEARER_VALUE",
    "NPM_AUTH",
    "HTTP_AUTHORIZATION",
    "SENTRY_DSN",
    "DATABASE_URL",
    "APP_DATABASE_URL",
    "REDIS_URL",
    "MONGODB_URI",
    "GITHUB_PAT",
    "SESSION_COOKIE",
    "JWT",
    "SSH_PRIVATE_KEY",
    "API_TOKENS",
    "HF_TOKENS_2",
    "MYKEY",
    "OPENAIKEY",
    "SIGNING_KEY",
    "ENCRYPTION_KEYS",
    "MAX_API_KEY",
    "monkeyApiKey",
]
PLAIN_NAMES = [
    "HOME",
    "PWD",
    "OLDPWD",
    "USER",
    "PATH",
    "MODEL_PATH",
    "MAX_TOKENS",
    "TOKENIZER_PATH",
    "TOKENIZERS_PARALLELISM",
    "N_PASSES",
    "PASS_AT_K",
    "HTTP_BYPASS",
    "COMPASS",
    "KEY_FILE",
    "ADMIN_KEY_FILE",
    "TOKEN_PATH",
    "SORT_KEY_COLUMN",
    "KEYBOARD",
    "AUTHOR",
    "HTTP_PROXY",
    "BASE_URL",
    "GATEWAY_URL",
    "REWARD_URL",
    "PATTERN",
    "CUDA_VISIBLE_DEVICES",
    "SEED",
    "MASTER_ADDR",
    "COUNTER",
    "PASSAGES",
    "DATABASE_NAME",
    "MONKEY",
    "TURKEY",
    "WHISKEY",
    "HOTKEY",
    "MAX_TOKEN_BUDGET",
    "MAX_TOKEN",
    "EOS_TOKEN",
    "PAD_TOKEN_ID",
    "TOKENS_PER_SECOND",
    "PROMPT_TOKENS",
    "LABEL_KEY",
    "REWARD_KEY",
    "PUBLIC_KEY",
    "TOKEN_LEVEL",
]
SECRET_VALUES = [
    "postgres://user:hunter2@db.example.com/app",
    "https://ghp_0123456789abcdefghij@github.com/x/y.git",
    "redis://:hunter2@cache:6379/0",
    "host=db user=me password=hunter2-long",
    "https://store.example.com/blob?sv=2020&sig=abcdef123456",
    "sk-proj-0123456789abcdef0123",
    "hf_abcdefghijklmnopqrstuvwxyz",
    "github_pat_0123456789abcdefghijkl",
    "AKIAIOSFODNN7EXAMPLE",
    "sk-ant-api03-Ab1_cd2-ef3_gh4-ij5_kl6-mn7_op8-qr9_st0-uv",
    "sk-abcde-Zx3n1aXy7kQ0pLmR5tUv8wYz-1234_abcd",
    "sk_live_0123456789abcdefABCD",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.x",
    "Bearer abcdefgh12345678",
    "Basic dXNlcjpodW50ZXI=",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIE",
    "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=abcdefghijkl==",
]
PLAIN_VALUES = [
    "/data/models/qwen",
    "http://127.0.0.1:8080",
    "http://[::1]:8080/v1?limit=3",
    "postgres://db.example.com/app",
    "ssh://git@github.com/x/y.git",
    "me@example.com",
    "Qwen/Qwen3-0.6B",
    "task-sk-1",
    "sk-learn-pipelines-v2",
    "sk-learn-gradient-boosting-baseline",
    "Basic authentication",
    "0,1,2",
    "",
]


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_secret_name_is_detected(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", PLAIN_NAMES)
def test_other_name_is_not_secret(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize("value", SECRET_VALUES)
def test_secret_value_is_detected(value: str) -> None:
    assert is_secret_value(value)


@pytest.mark.parametrize("value", PLAIN_VALUES)
def test_other_value_is_not_secret(value: str) -> None:
    assert not is_secret_value(value)
