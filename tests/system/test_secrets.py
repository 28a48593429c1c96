"""Secrets are masked however they are written, and text from outside commands no terminal."""

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
    "spelled",
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
def test_a_secret_is_known_in_every_spelling(spelled) -> None:
    text = f"before {spelled(SECRET)} after"
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
def test_the_name_of_a_variable_says_that_it_is_secret(name: str) -> None:
    assert masked("say open sesame", {name: "open sesame"}) == "say ***"


@pytest.mark.parametrize("name", ["PATH", "PWD", "OLDPWD", "TOKENIZERS_PARALLELISM", "AUTHOR", "HOME"])
def test_other_variables_are_not(name: str) -> None:
    assert masked("say open sesame", {name: "open sesame"}) == "say open sesame"


def test_short_values_stand_in_ordinary_text() -> None:
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
def test_credentials_in_addresses(text: str, hidden: str) -> None:
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
def test_what_is_no_secret_stays(text: str) -> None:
    assert masked(text, {}) == text


def test_what_is_cut_is_masked_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "verysecretvalue")
    assert "very" not in quoted("x" * 70 + "verysecretvalue")
    assert "very" not in plain("x" * 70 + "verysecretvalue", 80)


def test_forms_of_keys() -> None:
    assert masked(f"hf_{'aB3' * 11} and {'deadbeef' * 5}", {}) == "*** and ***"


def test_the_password_in_a_variable_with_an_address_is_secret_everywhere() -> None:
    environ = {"DATABASE_URL": "postgres://bob:hunter%402two@db/x", "HOME": "/home/me"}
    assert masked("hunter%402two or hunter@2two in /home/me", environ) == "*** or *** in /home/me"


def test_data_is_masked_text_by_text() -> None:
    data = {"steps": 100000, "a hidden key": ["hidden", None, {"x": 1.5}]}
    environ = {"MAX_TOKENS": "100000", "A_KEY": "hidden"}
    hidden = masked_data(data, lambda text: masked(text, environ))
    assert hidden == {"steps": 100000, "a *** key": ["***", None, {"x": 1.5}]}


def test_nothing_printed_commands_a_terminal() -> None:
    stream = io.StringIO()
    say("one\x1b[31m\rtwo\u202e\nthree\udcff", stream)
    assert stream.getvalue() == "one\\x1b[31m\\rtwo\\u202e\nthree\\udcff\n"
    assert visible("a\x1b[1m\n\u202eb\U000e0001") == "a\\x1b[1m\\n\\u202eb\\U000e0001"
