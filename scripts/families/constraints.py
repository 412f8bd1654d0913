"""Constraints: short texts under a checkable demand (length, letters, format, words to use or to avoid)."""

import random

from scripts.families import Family
from scripts.families.words import (
    ANIMALS,
    AUDIENCES,
    CITIES,
    CONCEPTS,
    FOODS,
    HOBBIES,
    JOBS,
    NAMES,
    NATURE,
    OBJECTS,
    RELATIVES,
    WEEKDAYS,
    a,
    commas,
    number,
    slots,
)

# ------------------------------------------------------------------------------------------------------ lists
SUBJECTS = (*NATURE, *HOBBIES, *(a(animal) for animal in ANIMALS), *(a(thing) for thing in OBJECTS), *CITIES,
            *FOODS)
KINDS = commas("""
fruits, vegetables, animals, countries, colors, sports, jobs, tools, drinks, flowers, rivers, musical
instruments, kitchen items, school subjects, pieces of furniture, clothes, vehicles, birds, trees, board
games, spices, insects
""")
PLACES = commas("""
in a kitchen, at school, on a farm, in an office, at the beach, in a hospital, in a big city, in a garden, at
an airport, in a toy shop, on a ship, in the mountains, at a birthday party, in a museum, at a market, in a
library
""")
LETTERS = tuple("ABCDFGHLMPRST")
STARTS = commas("""
Today, Sometimes, Once, Every, Nobody, Imagine, When, Because, Yesterday, Quietly, Finally, Perhaps
""")
ENDS = commas("""
again, forever, tomorrow, together, home, alone, slowly, tonight, in the end, at last, of course, for free
""")
TONES = commas("cheerful, serious, mysterious, calm, dramatic, funny, sad, proud, dreamy, grumpy")
AVOID = commas("very, the, and, good, nice, is, like, a, big, it")
SEPARATORS = commas("commas, semicolons, slashes, dashes, vertical bars")
SYMBOLS = ("*", "-", ">", "+", "#")
TEXT_KINDS = commas("""
sentence, slogan, headline, greeting, warning, riddle, question, promise, piece of advice, compliment, toast,
caption
""")
MOMENTS = commas("""
a rainy {day}, the first day of school, a lost {object}, a trip to {city}, a talking {animal}, a broken
{object}, a surprise from my {relative}, a night in {city}, a day without electricity, a race against
{a_animal}, a long queue, cooking {food}, a letter from {city}, a new neighbor, {a_animal} in the house,
learning {hobby}
""")

_INNER = slots(day=WEEKDAYS, object=OBJECTS, city=CITIES, animal=ANIMALS, relative=RELATIVES, food=FOODS,
               hobby=HOBBIES)


def _moment(rng: random.Random) -> str:
    return rng.choice(MOMENTS).format(**_INNER(rng))


def _two_words(rng: random.Random) -> dict[str, str]:
    """Words to use in a text: three different things and a place."""
    first, second, third = rng.sample((*ANIMALS, *OBJECTS), 3)
    return {"first": first, "a_first": a(first), "second": second, "third": third,
            "place": rng.choice(PLACES), "tone": rng.choice(TONES),
            "name": rng.choice(NAMES), "kind": rng.choice(TEXT_KINDS)}


# --------------------------------------------------------------------------------------------------- families
LENGTH = Family("exact_length", "constraints", (
    "Write exactly {few} words about {subject}.",
    "Describe {subject} in one sentence of {low} to {high} words.",
    "Write {sentences} short sentences about {subject}. No more, no less.",
    "Give me a {tone} title of {few} words for a book about {subject}.",
    "In no more than {high} words, tell {audience} why {subject} can be interesting.",
    "Two sentences about {subject}: the first with {few} words, the second with {low} words.",
    "Write a {tone} headline about {subject}, max {low} words.",
    "Answer with a single word: what do you think of first when you hear \"{subject}\" and \"{subject2}\"?",
), slots(subject=SUBJECTS, subject2=SUBJECTS, few=number(3, 9), low=number(8, 14), high=number(15, 30, 5),
         sentences=commas("two, three"), tone=TONES, audience=AUDIENCES))

LISTS = Family("lists", "constraints", (
    "List {count} {kind} you might see {place}. One per line, no descriptions.",
    "Name {count} {kind}, separated by {separator}. Nothing else.",
    "Give a numbered list of {count} things you find {place}, each of at most three words.",
    "Write {count} bullet points about {subject}. Start each with \"{symbol}\" and use at most six words "
        "each.",
    "List three {kind} in alphabetical order, then three things found {place}.",
    "Name {count} {kind} that are good for {audience}. Put each in quotation marks, on one line.",
    "Three {kind} and three things {place}: answer as two lines, each starting with a label and a colon.",
    "Give {count} words that describe {subject}. Separate them with {separator}.",
), slots(count=commas("three, four, five"), kind=KINDS, place=PLACES, separator=SEPARATORS, subject=SUBJECTS,
         symbol=SYMBOLS, audience=AUDIENCES))

LETTER = Family("letters", "constraints", (
    "Name three {kind} that start with the letter {letter}. One line.",
    "Write a sentence about {subject} in which the first word starts with {letter}.",
    "Give me a first name and a city that start with {letter}, and use both in one sentence about {subject}.",
    "Write a short sentence about {subject} without the letter \"{avoid}\".",
    "Think of a word that starts with {letter} and fits {subject}. Reply with just that word.",
    "Make an alliteration of four words with {letter} about {subject}.",
    "Write a {tone} sentence about {subject} in which the last word ends with \"{end}\".",
    "Write the words \"{subject}\" in capital letters, then name one of the {kind} that starts with "
        "{letter}.",
), slots(kind=KINDS, letter=LETTERS, subject=SUBJECTS, tone=TONES, avoid=tuple("bcfjkqvxz"),
         end=tuple("sdtyenr")))

INCLUDE = Family("use_these_words", "constraints", (
    "Write one sentence with the words \"{first}\" and \"{second}\".",
    "Use the words {first}, {second} and {third} in a {tone} story of two sentences.",
    "Write a {tone} {kind} that mentions {a_first} {place}.",
    "Put {first}, {second} and {third} in one sentence that takes place {place}.",
    "Write a sentence about {a_first} and {name}, but do not use the word \"{second}\".",
    "Tell what happens {place} in two sentences. The first must contain \"{first}\", the second "
        "\"{second}\".",
    "Write a question with \"{first}\" and an answer with \"{second}\". Two lines, {tone}.",
    "{name}, {a_first}, {place}: make a {tone} sentence of these.",
), _two_words)

EDGES = Family("start_and_end", "constraints", (
    "Write a sentence about {moment} that starts with \"{start}\".",
    "Write a {tone} sentence about {moment} that ends with the words \"{end}\".",
    "Tell a two-sentence story about {moment}. Begin with \"{start}\" and end with \"{end}\".",
    "Write about {moment} in one sentence and finish with an exclamation mark. Tone: {tone}.",
    "Ask three questions about {moment}. Every line must end with a question mark.",
    "Write a {tone} sentence about {moment}. Begin your reply with \"Answer:\".",
    "Complete in one sentence, about {moment}: \"{start} ...\"",
    "Write one sentence about {moment}, and put the word \"{end}\" in capital letters.",
), slots(moment=_moment, start=STARTS, end=ENDS, tone=TONES))

FORMAT = Family("formats", "constraints", (
    "Give me a JSON object with the keys \"name\", \"color\" and \"size\" that describes {a_object}. Owner: "
        "{name}.",
    "Write one CSV line (item,price,owner) for something that {name} bought {place}.",
    "Describe {subject} as a Markdown list with exactly three items.",
    "Answer in the form \"Pro: ... Con: ...\" about {subject} for {a_job}.",
    "Write one line of dialogue, in quotation marks: {name} talks to {a_job} about {subject}.",
    "Fill in this form for {a_job} called {name}:\nName:\nJob:\nFavorite food:\nLikes {hobby} (yes/no):",
    "Write this on one line with slashes between the parts: {name}, {a_job}, {city}, {hobby}.",
    "Reply with only \"yes\" or \"no\" and one reason in brackets: can {a_job} enjoy {hobby} {place}?",
), slots(object=OBJECTS, name=NAMES, place=PLACES, subject=SUBJECTS,
         job=JOBS, hobby=HOBBIES, city=CITIES))

POEMS = Family("small_poems", "constraints", (
    "Write a haiku about {nature} and {subject}.",
    "Write two rhyming lines about {subject}, in a {tone} tone.",
    "Write a four-line poem about {moment}. Keep every line under seven words.",
    "Make a {tone} riddle about {subject} in at most two sentences, then give the answer.",
    "Write a couplet for a card to {name} about {nature}.",
    "Give me one line of a {tone} song about {subject} and {name}.",
    "Write a tongue twister about {subject}, {tone}, one line.",
), slots(nature=NATURE, subject=SUBJECTS, tone=TONES, moment=_moment, name=NAMES))

NEGATIVES = Family("without", "constraints", (
    "Describe {subject} in one sentence without the word \"{avoid}\".",
    "Explain {concept} to {audience} in one sentence. Do not use numbers or the word \"{avoid}\".",
    "Write a {tone} sentence about {subject} without commas.",
    "Tell {audience} about {moment} in two short sentences, without names.",
    "Say why {subject} matters. No adjectives, one sentence, {tone}.",
    "Recommend {hobby} to {audience} in one sentence, without the word \"fun\".",
    "Give one tip about {hobby}, then stop. No introduction and no list. It is for {audience}.",
    "Define {concept} for {audience}. Do not repeat the term itself, and use one sentence.",
), slots(subject=SUBJECTS, avoid=AVOID, concept=CONCEPTS, audience=AUDIENCES, tone=TONES, moment=_moment,
         hobby=HOBBIES))

FAMILIES = (LENGTH, LISTS, LETTER, INCLUDE, EDGES, FORMAT, POEMS, NEGATIVES)
