"""Secrets are masked in every spelling, and control characters in foreign text are escaped."""

from __future__ import annotations

import html
import io
import json
import shlex
from urllib.parse import quote

import pytest
import yaml

from lmtool.config.messages import quoted
from lmtool.reporting.text import plain
from lmtool.system.secrets import masked, masked_data
from lmtool.system.terminal import say, visible

SECRET = 'it\'s "quo\\ted" & <sécret>/+=%'


@pytest.mark.parametrize(
    "spell",
    [
        str,
        json.dumps,
        lambda text: json.dumps(text, ensure_ascii=False),
        repr,
        html.escape,
        quote,
        lambda text: quote(text, safe=""),
        shlex.quote,
        lambda text: yaml.safe_dump(text, allow_unicode=True, width=1000),
        lambda text: yaml.safe_dump(text, allow_unicode=True, width=1000, default_style="'"),
        lambda text: f"x.y='{text}'".replace("'", "\\'"),
    ],
)
def test_secret_is_masked_in_every_spelling(spell) -> None:
    text = f"before {spell(SECRET)} after"
    hidden = masked(text, {"SOME_TOKEN": SECRET})
    assert "***" in hidden and "cret" not in hidden and "quo" not in hidden
    assert hidden.startswith("before ") and hidden.endswith("after")


@pytest.mark.parametrize(
    "name",
    [
        "MY_API_KEY",
        "HF_TOKEN",
        "DB_password",
        "SERVICE_AUTH",
        "X_BEARER",
        "npm_config__auth",
        "MYSQL_PWD",
        "GITHUB_PAT",
        "SMTP_PASS",
    ],
)
def test_values_of_secret_variables_are_masked(name: str) -> None:
    assert masked("say open sesame", {name: "open sesame"}) == "say ***"


@pytest.mark.parametrize("name", ["PATH", "PWD", "OLDPWD", "TOKENIZERS_PARALLELISM", "AUTHOR", "HOME"])
def test_values_of_other_variables_are_not_masked(name: str) -> None:
    assert masked("say open sesame", {name: "open sesame"}) == "say open sesame"


def test_short_and_common_values_are_not_masked() -> None:
    assert masked("ab and true", {"A_TOKEN": "ab", "B_TOKEN": "true"}) == "ab and true"


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("https://bob:hunter2@host/x", "https://***@host/x"),
        ("data.path=s3://bob:hun@ter2@host/x?a=1", "data.path=s3://***@host/x?a=1"),
        ("https:/bob:hunter2@host/x", "https:/***@host/x"),
        ("https://ghp_0123@github.com/x", "https://***@github.com/x"),
        ("https://host/x?id=1&access_token=abc&n=2", "https://host/x?id=1&access_token=***&n=2"),
        ("https://host/x?X-Amz-Signature=0a1b", "https://host/x?X-Amz-Signature=***"),
        ("'postgres://bob:hunter2@db:5432/x'", "'postgres://***@db:5432/x'"),
    ],
)
def test_credentials_in_urls_are_masked(text: str, hidden: str) -> None:
    assert masked(text, {}) == hidden


@pytest.mark.parametrize(
    "text",
    [
        "checkpoint=hf://org/name@main",
        "checkpoint=hf://gpt2@main",
        "checkpoint=hf://org/name@" + "0a" * 20,
        "checkpoint=hf_distilbert",
        "https://host:8080/a/b and bob@host",
        "max_tokens=1000 tokenizer.name=bpe",
    ],
)
def test_harmless_text_is_not_masked(text: str) -> None:
    assert masked(text, {}) == text


def test_text_is_masked_before_truncation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "verysecretvalue")
    assert "very" not in quoted("x" * 70 + "verysecretvalue")
    assert "very" not in plain("x" * 70 + "verysecretvalue", 80)


def test_api_keys_and_hashes_are_masked() -> None:
    assert masked(f"hf_{'aB3' * 11} and {'deadbeef' * 5}", {}) == "*** and ***"


def test_password_of_url_variable_is_masked_everywhere() -> None:
    environ = {"DATABASE_URL": "postgres://bob:hunter%402two@db/x", "HOME": "/home/me"}
    assert masked("hunter%402two or hunter@2two in /home/me", environ) == "*** or *** in /home/me"


def test_strings_in_nested_data_are_masked() -> None:
    data = {"steps": 100000, "a hidden key": ["hidden", None, {"x": 1.5}]}
    environ = {"MAX_TOKENS": "100000", "A_KEY": "hidden"}
    hidden = masked_data(data, lambda text: masked(text, environ))
    assert hidden == {"steps": 100000, "a *** key": ["***", None, {"x": 1.5}]}


def test_control_characters_are_escaped() -> None:
    stream = io.StringIO()
    say("one\x1b[31m\rtwo\u202e\nthree\udcff", stream)
    assert stream.getvalue() == "one\\x1b[31m\\rtwo\\u202e\nthree\\udcff\n"
    assert visible("a\x1b[1m\n\u202eb\U000e0001") == "a\\x1b[1m\\n\\u202eb\\U000e0001"
