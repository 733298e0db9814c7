import io
import re
import sys

import pytest

from peagle.bench.demo import Answer, SweepPoint, Total
from peagle.bench.demo_prompts import DemoPrompt
from peagle.bench.demo_screen import PlainScreen, RichScreen, make_screen
from peagle.engine.stats import SpecMetrics
from tests.conftest import make_tokenizer

TOTALS = [Total("plain", 0, 100, 5.0, 20.0, 1.0, 1.0), Total("P-EAGLE", 7, 100, 2.5, 40.0, 3.0, 2.0)]


def show(screen: PlainScreen) -> None:
    tokenizer = screen.tokenizer
    ids = tokenizer.encode("a cat sat.", add_special_tokens=False)
    accepted = [False, True, True, True, True, True, False, False, True, False]
    answer = Answer(ids, accepted, 0.5, 3, SpecMetrics(2, 6, 6))
    screen.legend()
    screen.prompt(0, 1, DemoPrompt("chat", "Tell [me] more."))
    screen.begin("P-EAGLE, K = 3", [1])
    screen.tokens(ids, accepted)
    screen.end(answer, Answer(ids, accepted, 1.0))
    screen.sweep([SweepPoint("P-EAGLE", 1, 30.0, 1.5), SweepPoint("P-EAGLE", 2, 40.0, 2.0)])
    screen.totals(TOTALS)
    screen.verdict("Outputs identical.", True)


def test_plain_marks_accepted_drafts(capsys):
    show(PlainScreen(make_tokenizer()))
    text = capsys.readouterr().out
    assert "a ‹cat› sa‹t›." in text
    assert "10 tokens in 0.5 s · 20.0 tokens/s · acceptance length 4.00 · 2.00x plain" in text
    assert re.search(r"P-EAGLE +30\.0 \(1\.50\)  40\.0 \(2\.00\)", text)
    assert text.rstrip().endswith("Outputs identical.")


def test_an_ascii_terminal_gets_ascii(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    show(PlainScreen(make_tokenizer()))
    sys.stdout.flush()
    assert b"a <cat> sa<t>." in raw.getvalue()


@pytest.mark.parametrize("colour", [True, False])
def test_rich_styles_accepted_drafts(monkeypatch, colour):
    rich = pytest.importorskip("rich.console")
    screen = RichScreen(make_tokenizer())
    out = io.StringIO()
    screen.console = rich.Console(file=out, force_terminal=True, no_color=not colour, color_system="standard", width=90)
    screen.draft_style = "green" if colour else "underline"
    show(screen)
    text = out.getvalue()
    code = "32" if colour else "4"
    assert f"\x1b[{code}mcat\x1b[0m" in text
    assert "[me]" in text  # an answer's or prompt's brackets are no markup
    assert "P-EAGLE, K = 7" in text


def test_no_terminal_means_plain_text():
    assert type(make_screen(make_tokenizer())) is PlainScreen
