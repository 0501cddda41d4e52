"""Which regular expressions Java may need exponential time for."""

import pytest

from waldelta.config.regex_cost import why_slow

SLOW = [
    "(.*a){12}b",
    "(a+)+b",
    "(a*)*",
    "(a|a)*b",
    "(a|aa)+$",
    "(x+x+)+y",
    r"(\w+\s?)*$",
    r"(\d|\w)+!",
    "(a?){30}a{30}",
    "((a{0,9}){0,9}){0,9}b",
    "(a{1,1000000000}){1,1000000000}b",
    ".*a.*a.*a.*a.*b",
    "(?i)(A|a)+b",
    r"^(\p{L}+)*$",
    "(?<name>.*a){12}b",
    "(?=(a+)+b)c|(a+)+d",
    "(" * 60 + "a+" + ")" * 60,
]
FAST = [
    "", r"^[a-z0-9._%+-]+@[a-z0-9.-]+\.[a-z]{2,}$", "^[a-z]+(,[a-z]+)*$", r"^\w+( \w+)*$",
    r"^\d{4}-\d\d-\d\d$", r"^(\d{1,3}\.){3}\d{1,3}$",
    r"^https?://[\w.-]+(:\d+)?(/[^?#]*)?(\?[^#]*)?(#.*)?$",
    "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "^(foo|bar|baz)+$",
    "^(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec){2}$",
    r"^-?(?:\d{1,3}(?:,\d{3})*|\d+)(?:\.\d+)?$", r"^\+?[0-9 ()-]{6,20}$", r"^[^\]]+\]$",
    r"^\p{L}+$", r"^(?=.*[A-Z])(?=.*\d).+$", "a.*b.*c", "(a++)+b", r"\Q(.*a){12}b\E",
]  # fmt: skip
NOT_JAVA = ["[", "(", "a)", "(?"]


@pytest.mark.parametrize("pattern", SLOW)
def test_slow(pattern):
    assert why_slow(pattern) is not None


@pytest.mark.parametrize("pattern", FAST + NOT_JAVA)
def test_not_slow(pattern):
    """Where the next character decides, repetition is fine; what isn't Java's Spark refuses."""
    assert why_slow(pattern) is None
