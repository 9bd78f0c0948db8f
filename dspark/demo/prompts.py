"""The prompts of the demo: four classes, three each, written for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Prompt:
    """One user turn."""

    kind: str  # arithmetic, code, chat or poem
    text: str

    @property
    def messages(self) -> list[dict[str, str]]:
        """The turn as OpenAI chat messages."""
        return [{"role": "user", "content": self.text}]


WARM_UP = Prompt("warm-up", "Name three rivers.")

PROMPTS = (
    Prompt(
        "arithmetic",
        "A baker fills 6 trays with 8 rolls each and sells 31 rolls. How many rolls are left? Think step by step.",
    ),
    Prompt(
        "arithmetic",
        "A bus leaves at 9:15 and arrives at 11:05. How many minutes does the ride take? Explain each step.",
    ),
    Prompt(
        "arithmetic",
        "Maya saves 12 dollars a week and has 30. A bicycle costs 150 dollars. How many weeks must she save?",
    ),
    Prompt("code", "Write a Python function `is_palindrome(text)` that ignores case and spaces. Add a docstring."),
    Prompt("code", "Write a Python function that counts how often each word occurs in a string and returns a dict."),
    Prompt("code", "Write a SQL query that lists the ten customers with the highest total of orders."),
    Prompt("chat", "What should I look at before I buy a used bicycle?"),
    Prompt("chat", "Why is the sky blue? Explain it to a child."),
    Prompt("chat", "Suggest a simple dinner with rice, eggs and spinach, and say how to cook it."),
    Prompt("poem", "Write a short poem about the first snow in a small town."),
    Prompt("poem", "Write four rhyming lines about a lighthouse at night."),
    Prompt("poem", "Write a poem about an old clock that has forgotten the time."),
)
