"""What is taken out of texts before they are kept, and what stays: hand-written, with labels."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import pytest

from controller.store.redaction import (
    CHARS_MOST,
    IBAN_CHARS,
    USUAL,
    Redactor,
    cut,
    load_patterns,
)
from policy.files import FileError

if TYPE_CHECKING:
    from pathlib import Path

KEY = "MIIEvgIBADANBgkqhkiG9w0BAQEFAASCBKgwggSkAgEAAoIBAQC7"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9P"

GOES = [
    # (text, what must not be left of it, what stands there instead)
    ("write to ann@example.com today", "ann@example.com", "[email]"),
    ("Ann.Smith+tag@mail.example.co.uk", "Smith", "[email]"),
    ("邮箱是li.wei@example.cn谢谢", "li.wei", "[email]"),
    ("<bob_99%x@sub-domain.example.org>", "bob_99", "[email]"),
    ("mailto:carol@example.io?subject=x", "carol", "[email]"),
    ("two: a@b.example, c.d@e.example", "c.d", "[email]"),
    ('{"to":"dave@example.com"}', "dave", "[email]"),
    ("first\\nerin@example.com", "erin@", "[email]"),
    ("call +1 415 555 2671 now", "555", "[phone]"),
    ("+44 20 7946 0958", "7946", "[phone]"),
    ("+49 (0)30 901820", "901820", "[phone]"),
    ("tel:+8613800138000", "138001", "[phone]"),
    ("+33-1-42-68-53-00.", "42-68", "[phone]"),
    ("0044 20 7946 0958", "7946", "[phone]"),
    ("0086-139-1234-5678", "1234", "[phone]"),
    ("手机13800138000谢谢", "13800138000", "[phone]"),
    ("电话:139 1234 5678。", "1234", "[phone]"),
    ("微信同号 158-0013-8000", "0013", "[phone]"),
    ("86 17712345678", "17712345678", "[phone]"),
    ("座机 010-62345678", "62345678", "[phone]"),
    ("(415) 555-2671", "555", "[phone]"),
    ("415-555-2671 is hers", "555", "[phone]"),
    ('"phone": "\\u7535\\u8bdd13912345678"', "13912345678", "[phone]"),
    ("身份证11010519491231002X", "11010519491231002X", "[id_number]"),
    ("id 440308199901011517", "440308199901011517", "[id_number]"),
    ("310105 19800101 1235", "19800101", "[id_number]"),
    ("小写x也算:11010519491231002x", "11010519491231002x", "[id_number]"),
    ("旧证号130503670401001", "130503670401001", "[id_number]"),
    ("card 4111 1111 1111 1111", "1111", "[card]"),
    ("4111111111111111", "4111", "[card]"),
    ("5500-0000-0000-0004 exp 12/27", "0004", "[card]"),
    ("amex 3782 822463 10005", "822463", "[card]"),
    ("银联6222021234567890128", "6222021234567890128", "[card]"),
    ("diners 30569309025904,", "30569309025904", "[card]"),
    ("12 4242424242424242 34", "4242", "[card]"),
    ("Discover 6011 1111 1111 1117.", "1117", "[card]"),
    ("mastercard 2223003122003222", "2223003122003222", "[card]"),
    ("DE89 3704 0044 0532 0130 00", "3704", "[iban]"),
    ("GB82WEST12345698765432", "WEST", "[iban]"),
    ("pay to FR14 2004 1010 0505 0001 3M02 606 please", "0505", "[iban]"),
    ("NL91ABNA0417164300.", "ABNA", "[iban]"),
    ("iban: nl91abna0417164300", "abna", "[iban]"),
    ("Authorization: Bearer abcDEF1234567890", "abcDEF", "[token]"),
    ("authorization: basic dXNlcjpwYXNzd29yZA==", "dXNlc", "[token]"),
    (f"Bearer {JWT}", JWT[-12:], "[jwt]"),
    (f"jwt={JWT}&x=1", JWT[:20], "[jwt]"),
    ("AKIAIOSFODNN7EXAMPLE", "IOSFODNN7", "[aws_key]"),
    ("aws ASIAIOSFODNN7EXAMPLE!", "IOSFODNN7", "[aws_key]"),
    ("aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "wJalr", "[secret]"),
    ("sk-proj-abc123DEF456ghi789JKL", "abc123", "[api_key]"),
    ("sk_live_4eC39HqLyjWDarjtT1zdp7dc", "4eC39", "[api_key]"),
    ("ghp_16C7e42F292c6912E7710c838347Ae178B4a", "16C7e", "[api_key]"),
    ("glpat-abcdefghij1234567890", "abcdefghij", "[api_key]"),
    ("xoxb-123456789012-abcdefABCDEF", "123456789012", "[api_key]"),
    ("AIzaSyA1234567890abcdefghijklmnopqrstuv", "SyA123", "[api_key]"),
    ("hf_abcdefghijklmnopqrstuvwxyzABCDEFGH", "abcdefgh", "[api_key]"),
    ("twk_Zm9vYmFyYmF6cXV4Zm9vYmFyYmF6cXV4", "Zm9v", "[api_key]"),
    ("API_KEY=9f86d081884c7d65", "9f86d0", "[secret]"),
    ('{"api_key": "9f86d081884c7d65"}', "9f86d0", "[secret]"),
    ('{\\"password\\": \\"hunter2!\\"}', "hunter2", "[secret]"),
    ("password: correcthorse", "correcthorse", "[secret]"),
    ("Passwd=Tr0ub4dor&3", "Tr0ub", "[secret]"),
    ("密码是Abc12345，别告诉别人", "Abc12345", "[secret]"),  # noqa: RUF001
    ("口令：小明1234", "小明1234", "[secret]"),  # noqa: RUF001
    ("client_secret: 8xLOxBtZp8qqq1", "8xLOx", "[secret]"),
    (f"-----BEGIN PRIVATE KEY-----\n{KEY}\n-----END PRIVATE KEY-----", KEY, "[private_key]"),
    (f"-----BEGIN RSA PRIVATE KEY-----\n{KEY}", KEY, "[private_key]"),
    (f"-----BEGIN OPENSSH PRIVATE KEY-----\\n{KEY}\\n-----END OPENSSH PRIVATE KEY-----", KEY,
     "[private_key]"),
    ("https://bob:pa55word@host.example/x", "pa55word", "[url_login]"),
    ("postgres://app:s3cr3t@10.0.0.5:5432/db", "s3cr3t", "[url_login]"),
    ("redis://:letmein@cache:6379", "letmein", "[url_login]"),
    ("from 203.0.113.7 at noon", "203.0", "[ip]"),
    ("http://10.0.0.7:8000/v1", "10.0.0", "[ip]"),
    ("地址192.168.1.20。", "192.168", "[ip]"),
    ("server 10.1.2.3.", "10.1", "[ip]"),
    ("fe80::1ff:fe23:4567:890a", "4567", "[ip]"),
    ("[2001:db8::8a2e:370:7334]:443", "8a2e", "[ip]"),
    ("2001:0db8:85a3:0000:0000:8a2e:0370:7334.", "85a3", "[ip]"),
    ("::ffff:192.0.2.128 mapped", "192.0", "[ip]"),
]  # fmt: skip
STAYS = [
    "version 1.2.3 of the library", "v10.4.21-beta", "Python 3.11.9", "at 12:30:45 sharp",
    "2024-01-15 10:20:30", "2024-01-15T10:20:30Z", "1705314030123", "1705314030",
    "order 1234567890123", "order no 20240115000123456", "invoice 4111-22",
    "ISBN 978-3-16-148410-0",
    "4111 1111 1111 1112", "5500000000000005", "0000 0000 0000 0000", "1234567890123456789",
    "11010519491231002Y", "110105194913310021", "110105194912310021", "99010519491231002X",
    "GB83 WEST 1234 5698 7654 32", "AB12 is a postcode", "std::vector<int>::iterator", "a::b",
    "Foo::Bar.baz()", "chapter 12:3:4", "me @ home", "@ann wrote it", "a@b", "price is $1,299.99",
    "12,000,000,000 yuan", "3.14159265358979", "0.0.1", "100.200.300.400", "+5 points", "+100%",
    "7 + 1234567", "12800138000", "1380013800", "138001380001", "room 010-12", "10-20-30",
    "the token limit is 4096", "max_tokens: 512", "token: yes", "his secret: patience",
    "the password must be changed", "forgot your password?", "bearer of good news",
    "Basic requirements apply here", "sk-learn and sk-image", "the api key is missing",
    "eyJ is how JSON begins", "AKIA is a prefix", "https://example.com/a:b@c", "https://example.com/",
    "ratio 16:9", "C++::", "-----BEGIN CERTIFICATE-----", "今天是2024年1月15日", "共13800元",
    "编号A13800138000B", "f00d:cafe", "9f86d081884c7d659a2feaa0c55ad015", "id 42", "2+2=4",
    "SELECT * FROM orders WHERE id = 1234567", "1-800-FLOWERS", "GB is a country", "3:2 win",
    "deadbeef-dead-beef-dead-beefdeadbeef", "π is 3.141592653589793238",
]  # fmt: skip


def test_there_is_enough_of_both() -> None:
    assert len(GOES) >= 60
    assert len(STAYS) >= 40
    said = " ".join(instead for _, _, instead in GOES)
    assert all(f"[{name}]" in said for name, _, _ in USUAL)


@pytest.mark.parametrize(("text", "secret", "instead"), GOES)
def test_it_goes(text: str, secret: str, instead: str) -> None:
    kept = Redactor().redact(text)
    assert secret not in kept
    assert instead in kept
    assert Redactor().redact(kept) == kept, "redacted twice, it is another text"


@pytest.mark.parametrize("text", STAYS)
def test_it_stays(text: str) -> None:
    assert Redactor().redact(text) == text


def test_what_stands_around_it_stays() -> None:
    text = (
        "Ann (ann@example.com, +49 30 901820) paid with 4111 1111 1111 1111,"
        " IBAN DE89370400440532013000 AND more"
    )
    assert Redactor().redact(text) == (
        "Ann ([email], [phone]) paid with [card], IBAN [iban] AND more"
    )
    assert Redactor().redact("https://bob:x@h/a?b=c") == "https://[url_login]@h/a?b=c"
    assert Redactor().redact("x: Bearer abc123abc123 ok") == "x: Bearer [token] ok"


def test_account_numbers_of_each_country_are_as_long_as_they_should_be() -> None:
    for country, chars in IBAN_CHARS.items():
        body = "1" * (chars - 4)
        number = int("".join(str(int(char, 36)) for char in f"{body}{country}00"))
        account = f"{country}{98 - number % 97:02d}{body}"
        assert Redactor().redact(f"to {account}.") == "to [iban]."


def test_a_long_text_is_cut_and_nothing_is_cut_in_two() -> None:
    word = "lorem ipsum "
    text = word * (CHARS_MOST // len(word) + 10)
    kept = cut(text)
    assert len(kept) <= CHARS_MOST
    assert kept.endswith(" [cut]")
    for before in range(24):  # an address across the cut
        filler = "x " * ((CHARS_MOST - 256) // 2 - 12) + "y" * before
        kept = Redactor().redact(f"{filler} ann.smith@example.com {'z ' * 2000}")
        assert "ann" not in kept
        assert "smith" not in kept
    assert cut("a" * CHARS_MOST) == "a" * CHARS_MOST
    assert len(cut("a" * CHARS_MOST * 2)) <= CHARS_MOST


SEEDS = [
    "a", "1", "1 ", "1-", "9 ", "eyJ-", "a@", "@", "a.", "+1", "+", "A1", "DE11", "://", "x://a:",
    "bearer ", "bearer a", "password=", "password", "token: ", "a:", "ab:", ":", "sk-", "(123) ",
    "-----BEGIN PRIVATE KEY-----", "0012 ", "1.", "255.", "\\n1", "密码是", "AKIA", "=", "%", "[a",
]  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS)
def test_no_text_takes_long(seed: str) -> None:
    """Patterns hold the interpreter, and so the requests of others, while they run."""
    text = (seed * CHARS_MOST)[:CHARS_MOST]
    took_s = []
    for _ in range(2):
        began_s = time.thread_time()
        Redactor().redact(text)
        took_s.append(time.thread_time() - began_s)
    assert min(took_s) < 0.5


def test_a_file_adds_patterns(tmp_path: Path) -> None:
    path = tmp_path / "redact"
    path.write_text("# ours\n\norder = ORD-\\d{8}\nname = (?i)\\bferdinand\\b\n", encoding="utf-8")
    redactor = Redactor(load_patterns(path))
    text = "Ferdinand asked for ORD-12345678, f@example.com"
    assert redactor.redact(text) == "[name] asked for [order], [email]"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("order", "is no pattern"), ("= abc", "is no pattern"), ("Order = abc", "is no pattern"),
        ("order = [a", "no regular expression"), ("order = (a+)+b", "repeats"),
        ("order = (?:a|b+)*", "repeats"), ("order = (?:ab?){2,}", "repeats"),
        ("order = (?:\\w+\\s?)*x", "repeats"), ("order = a*", "nothing at all"),
        ("order = \\d+\\d+\\d+x", "more than 10 ms"), ("order = \\w*\\w*\\w*y", "more than 10 ms"),
        ("order = .*.*.*=.*", "more than 10 ms"), ("order = " + "a" * 1001, "characters"),
        ("order = a\norder = b", "stands twice"),
    ],
)  # fmt: skip
def test_a_pattern_that_cannot_be_used_is_told(line: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "redact"
    path.write_text(f"# one\n{line}\n", encoding="utf-8")
    began_s = time.monotonic()
    with pytest.raises(FileError, match=re.escape(said)) as caught:
        load_patterns(path)
    assert "line" in str(caught.value)
    assert time.monotonic() - began_s < 20


@pytest.mark.parametrize(
    "regex",
    [
        "[A-Z]{3}-\\d{4,8}", "(?:\\d{1,3}\\.){3}\\d", "(?:EMP|EXT)\\d+", "(?:\\d{4}-){2,5}x",
        "(?:ab)+c", "\\bproject [a-z]{1,20}\\b", "(?:a{1,9})?b", "\\d{1,9} ?kg",
    ],
)  # fmt: skip
def test_a_harmless_pattern_is_taken(regex: str, tmp_path: Path) -> None:
    path = tmp_path / "redact"
    path.write_text(f"order = {regex}\n", encoding="utf-8")
    (pattern,) = load_patterns(path)
    assert pattern.regex.pattern == regex
