"""Prompts of our own for the training of the bundled heads: many subjects, many kinds of task, two turns each.

usage: python3 heads/our_prompts.py OUTPUT.jsonl [NUMBER]      the same prompts on every run

Prompts that the target writes itself come back to what it likes to talk about. A form with its blanks filled does not:
every combination is drawn once at most. Each row is {"turns": [first, second]}, the form that `peagle data` reads.
"""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path


def words(text: str) -> list[str]:
    """Of a list with a bar or the end of a line behind each."""
    return text.strip().replace("\n", "|").split("|")


SUBJECTS = words("""
volcanoes|the water cycle|black holes|photosynthesis|tides|coral reefs|bird migration|honey bees|glaciers
earthquakes|vaccines|sleep|the human heart|allergies|muscle growth|vitamins|the immune system|memory|stress
eyesight|inflation|supply and demand|central banks|the stock market|taxes|insurance|mortgages|unemployment
exchange rates|budgeting|the Roman Empire|the Silk Road|the printing press|the French Revolution|ancient Egypt
the Cold War|the Vikings|the Industrial Revolution|the Renaissance|the moon landing|the Ottoman Empire
the Great Depression|colonial trade|democracy|human rights|the separation of powers|elections|trade unions
immigration|city planning|public transport|stoicism|utilitarianism|free will|the trolley problem
existentialism|logic|ethics in medicine|the meaning of fairness|jazz|opera|hip hop|classical guitar|film music
impressionist painting|photography|architecture|theatre|poetry|ballet|chess|football|basketball|swimming
cycling|rock climbing|yoga|running a marathon|table tennis|sailing|bread baking|pasta|coffee|tea ceremonies
cheese|vegetarian cooking|spices|street food|fermentation|chocolate|gardening|composting|beekeeping
woodworking|knitting|pottery|bicycle repair|home insulation|painting a room|camping|solar panels|wind turbines
electric cars|batteries|nuclear power|recycling|clean water|deforestation|plastic waste|the internet
search engines|encryption|passwords|databases|operating systems|compilers|computer networks|web browsers
machine learning|neural networks|robots|self-driving cars|drones|3D printing|virtual reality|satellites
quantum computers|airplanes|bridges|skyscrapers|trains|ships|telescopes|microscopes|clocks|refrigerators
lasers|prime numbers|probability|fractions|triangles|graphs|infinity|negative numbers|statistics|algebra
calculus|a first job|a job interview|working from home|time management|public speaking|learning a language
making friends|raising a puppy|adopting a cat|moving to another city|planning a wedding|travelling alone
saving money|quitting smoking|school uniforms|homework|online learning|libraries|museums|summer camps
social media|video games|advertising|fashion|dinosaurs|whales|wolves|octopuses|elephants|penguins|spiders
butterflies|sharks|owls|mushrooms|cacti|rainforests|deserts
""")
PEOPLE = words("""
a retired sailor|a young doctor|a strict librarian|a street musician|a lonely astronaut|a village baker
a tired detective|a medieval knight|a time traveller|a school teacher|a talking parrot|a museum guard
a night-shift nurse|a mountain guide|a shy programmer|a famous chef|a wandering poet|a clumsy magician
a wise grandmother|a stubborn farmer|a spaceship captain|a taxi driver in a big city|an honest politician
a ghost in an old hotel|a child inventor|a football coach|a dragon
""")
PLACES = words("""
a lighthouse|an abandoned railway station|a small island|a crowded market|an underwater city
a mountain village|a library at midnight|a space station|a desert town|a rainy harbour|a forest cabin
an old theatre|a busy airport|a hospital waiting room|a haunted castle|a floating market
a research station at the pole|a rooftop garden
""")
THINGS = words("""
apples|pencils|books|marbles|tickets|coins|stamps|eggs|cookies|bottles|chairs|candles|shirts|bricks|roses
cards
""")
NAMES = words("""
Ada|Bruno|Chen|Dina|Elias|Fatima|Goran|Hana|Ivan|Julia|Kofi|Lena|Marco|Nadia|Omar|Priya|Rosa|Sven|Tara|Yuki
""")
TONES = words("""
friendly|formal|humorous|persuasive|calm|enthusiastic|critical|poetic|plain|sceptical
""")
LANGUAGES = words("""
Python|JavaScript|Java|C++|Go|Rust|SQL|Bash|TypeScript|Ruby
""")
DATA = words("""
a list of integers|a list of words|a string|a nested list|a dictionary of scores|two sorted lists|a matrix
a binary tree|a linked list|a list of dates|a text file|a CSV file|a log file|a list of (name, age) pairs
a graph as adjacency lists
""")
JOBS = words("""
finds the largest element|removes duplicates and keeps the order|counts how often each element occurs
reverses it|checks whether it is sorted|computes the average|finds the second smallest element
groups elements by their first letter|sums all even elements|returns the longest element
merges it with another one|finds all pairs with a given sum|rotates it by k places
checks whether it is a palindrome|splits it into chunks of size n|sorts it without built-in sorting
""")
VERBS = words("""
test|debug|speed up|document|simplify|review
""")

FORMS = """
Explain {subject} to a ten-year-old.
Explain {subject} in three sentences, then give one example.
What are the most common misunderstandings about {subject}?
Compare {subject} and {subject2}. Use a table with three rows.
Write a {tone} blog post about {subject} with a title and three sections.
Write a short story about {person} in {place}.
Write a dialogue between {person} and {person2} who meet in {place}.
Write a poem of three stanzas about {place}.
Describe {place} as {person} would see it.
Pretend to be {person}. What do you think about {subject}?
You are {person} who knows everything about {subject}. Answer in a {tone} tone: why should I care?
Write a {tone} email to {name} that asks for help with {subject}.
Write a {tone} letter of complaint about {subject} to the mayor.
Give me five tips about {subject} for beginners.
List ten facts about {subject}, the most surprising one first.
What are the advantages and disadvantages of {subject}?
Argue for and against this claim: "{subject} should be taught in every school."
Write a quiz of four multiple-choice questions about {subject}, with the answers at the end.
Make a study plan of one week for somebody who wants to learn about {subject}.
Give a brief history of {subject}.
Summarise what a newcomer must know about {subject} in about 80 words.
What questions should I ask an expert on {subject}?
Explain how {subject} and {subject2} are connected.
Write a speech of one minute about {subject} for {name}'s birthday.
Suggest three names for a podcast about {subject} and describe the first episode.
Write a product description for a device that helps with {subject}.
Plan a day trip for {name}, who loves {subject} and has {n} dollars.
{name} has {n} {thing} and buys {m} more each day. How many {thing} does {name} have after {d} days? Explain each step.
{name} and {name2} share {n} {thing} so that {name} gets {m} more than {name2}. How many does each get?
A shop sells {thing} at {m} dollars for {d}. How much do {n} {thing} cost? Show your work.
A train leaves at {h}:00 and travels {n} kilometres at {m} kilometres an hour. When does it arrive?
What is {n} times {m}, minus {d} times {h}? Explain how you found it.
If {d} workers need {h} days to build a wall, how long do {m} workers need? What do you assume?
The mean of {d} numbers is {n}. One of them, {m}, is taken away. What is the new mean?
Write a {language} function that takes {data} and {job}.
Write a {language} function that takes {data} and {job}. Include comments and a test.
Explain what could go wrong in a {language} program that reads {data} and {job}.
How would you {verb} a {language} program that works on {data}?
What is the time complexity of an algorithm that takes {data} and {job}? Explain.
Write a class in {language} for {subject} with three methods.
Write a SQL query that finds the {d} customers who bought the most {thing}.
Design a small web page about {subject} in HTML.
Extract all numbers and names from this text as JSON: "{name} sold {n} {thing} to {name2} for {m} dollars on day {d}."
Put these into alphabetical order and number them: {thing}, {thing2}, {subject}, {subject2}, {name}.
Correct the grammar: "{name} have buyed {n} {thing} because he were interest in {subject}."
Rewrite this in a {tone} tone: "We can not come because {name} is ill and we have no {thing}."
Translate into simple English: "{name} exhibits a pronounced predilection for {subject}."
Classify each of these as a place, a person or a subject: {place}, {person}, {subject}, {subject2}.
Is the following review positive or negative, and why? "I read a book about {subject}. {name} liked it; I fell asleep."
Which one does not belong: {thing}, {thing2}, {subject}? Give a reason.
{name} is older than {name2}, and {name2} is older than {name3}. Who is the youngest? Explain your reasoning.
All {thing} in the box are red. {name} takes something red out of it. Must it be one of the {thing}? Explain.
Three people, {name}, {name2} and {name3}, like {subject}, {subject2} and chess, one each.\
 {name} hates chess. {name2} likes {subject}. Who likes what?
What would happen if {subject} did not exist?
Invent a holiday that celebrates {subject}. How do people spend it?
Give me a recipe that {person} would cook in {place}.
What would {person} pack for a week in {place}?
Write the opening paragraph of a mystery novel set in {place}.
Write a product review in a {tone} tone of a book about {subject}.
Turn the life of {person} into a fable with a moral.
""".strip().splitlines()

FOLLOW_UPS = """
Now make it half as long.
Rewrite that in a {tone} tone.
Give an example.
Can you explain the second point in more detail?
Turn your answer into a list with numbers.
Write the same for an expert.
What did you leave out?
Now argue the opposite.
Summarise your answer in one sentence.
Continue.
Change the main character to {person}.
Are you sure? Check your answer step by step.
How does {subject} fit into this?
Translate the last sentence into French.
Write a title for it and explain your choice.
Now do it in {language}.
What if {name} had {n} instead?
Put it into a table.
Which part is the hardest to understand, and why?
Ask me three questions to see whether I understood.
""".strip().splitlines()


def fill(form: str, dice: random.Random) -> str:
    """A form with its blanks filled; blanks that differ in a digit only get different words."""
    words = {"subject": SUBJECTS, "person": PEOPLE, "place": PLACES, "thing": THINGS, "name": NAMES}
    drawn = {kind: dice.sample(several, 3) for kind, several in words.items()}
    single = {"tone": TONES, "language": LANGUAGES, "data": DATA, "job": JOBS, "verb": VERBS}
    numbers = {"n": (24, 480), "m": (3, 22), "d": (3, 9), "h": (5, 11)}

    def blank(match: re.Match[str]) -> str:
        kind, digit = match[1], int(match[2] or 1) - 1
        if kind in drawn:
            return drawn[kind][digit]
        return dice.choice(single[kind]) if kind in single else str(dice.randint(*numbers[kind]))

    text = re.sub(r"\{([a-z]+)(\d?)\}", blank, form)
    return text[0].upper() + text[1:]


def main() -> None:
    output, number = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 16000
    dice, seen = random.Random(2026), set()
    with output.open("w", encoding="utf-8") as lines:
        while len(seen) < number:
            first = fill(dice.choice(FORMS), dice)
            if first in seen:
                continue
            seen.add(first)
            lines.write(json.dumps({"turns": [first, fill(dice.choice(FOLLOW_UPS), dice)]}) + "\n")


if __name__ == "__main__":
    main()
