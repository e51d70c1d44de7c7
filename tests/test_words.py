"""Words and turns of phrase that an engineer would not write do not come back into pages, messages and docstrings."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# What is found, and what to write.
REFUSED = {
    r"\bwho(?:m)?ever\b": "a client that, the person who",
    r"\bso many\b": "that many, the number of",
    r"\bhears?\b": "is told, receives",
    r"\bbares? (?:a|the|its|no|every)\b": "exposes",
    r"\bof (?:its|their) own accord\b": "by itself",
    r"\bnobody's\b": "no client's",
    r"\bt(?:old|ell|ells) apart\b": "distinguished",
    r"\bfor ever\b": "permanently",
    r"\bin vain\b": "without need",
    r"\bin the place of\b": "in place of, instead of",
    r"\banew\b": "again",
    r"\bbut for\b": "except for",
    r"\bcomes? of it\b|\bcame of it\b|\bwhat comes of\b": "the result",
    r"\bcomes? to nothing\b": "fails",
    r"\bgain, never\b|\b's mood\b": "say what can influence or benefit whom",
    r"\bis the signer's word\b": "cannot be detected",
    r"\bnot withstood\b": "out of scope",
    r"\b(?:henceforth|hitherto|thereof|whereof|therein|whereby|thereby|withal|lest|albeit|betwixt)\b": "plain words",
    r"\ball the same\b": "still, nevertheless",
    r"\bbeside (?:Opacus|torch|pfl|peers|a loop|the loop|FedAvg|DP-SGD|the limits?)\b": "compared with",
    r"(?:^|[.;:] )(?:Too few|Nor|Never|Only so|Hence|Not so)\b[^.|]{0,40}, and\b": "if ..., then ...",
    r"(?:^|\. )Who (?:wants|may|has|knows|can)\b(?![^.]*\?)": "a person who",
    r"(?:^|\. )(?:Nor|Only then|Never|Nowhere) (?:is|are|was|does|do|can|may|has|have|will)\b": "the subject first",
}


def found(text: str) -> list[str]:
    """Return each refused phrase of a text, with its line and what to write instead."""
    return [
        f"line {number}: {match.group().strip()!r} ({instead})"
        for number, line in enumerate(text.splitlines(), 1)
        for pattern, instead in REFUSED.items()
        for match in re.finditer(pattern, line)
    ]


def pages() -> list[str]:
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    return sorted(file.relative_to(ROOT).as_posix() for file in files)


@pytest.mark.parametrize("page", pages())
def test_a_page_or_module_has_plain_words(page):
    assert found((ROOT / page).read_text()) == []


@pytest.mark.parametrize(
    "wrong",
    [
        "it may be lost to nobody's gain, never set back",
        "Too few left anywhere, and the attempt is void",
        "a run that never was is the signer's word",
        "Whoever may put a machine back at will is not withstood".lower(),
        "a node hears of the run",
        "revealing both would bare a vector",
        "our seconds beside Opacus",
        "Who wants every such client named plans for more.",
        "Nor does the server know.",
    ],
)
def test_the_check_finds_what_an_engineer_would_not_write(wrong):
    assert found(f"A plain sentence.\n{wrong}\n")


@pytest.mark.parametrize(
    "plain", ["The mean is taken over ten rounds.", "Who is asked? The cohort.", "the barest loop"]
)
def test_plain_sentences_pass(plain):
    assert found(plain) == []
