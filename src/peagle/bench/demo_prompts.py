"""The demo's prompts, written for it: short, of the kinds that people ask a small model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """One user turn and what kind of request it is."""

    kind: str
    text: str


DEMO_PROMPTS = (
    DemoPrompt("chat", "My houseplants keep dying while I am away. Give me three simple tips to keep them alive."),
    DemoPrompt(
        "code",
        "Write a Python function that returns the average of a list of numbers, with a docstring and an example.",
    ),
    DemoPrompt("maths", "What is the area of a room that is 5 metres long and 4 metres wide? Show each step."),
    DemoPrompt(
        "summary",
        "Summarise this text in two sentences.\n\n"
        "The old lighthouse at the end of the pier had been dark for eleven years when the town decided to sell it. "
        "A retired teacher bought it, repaired the stairs and the lamp with the help of her former pupils, and opened "
        "a small museum on the ground floor. On its first weekend more people climbed the tower than had visited the "
        "town in the whole month before. The mayor now wants to light the lamp again every Saturday night.",
    ),
    DemoPrompt("chat", "Why is the sky blue? Explain it to a ten-year-old."),
    DemoPrompt("code", "Write an SQL query that finds the five customers with the highest total order value."),
)
