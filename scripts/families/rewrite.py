"""Rewrite: one or a few sentences in, the same content in another form out."""

import random

from scripts.families import Family
from scripts.families.words import (
    ANIMALS,
    CITIES,
    FOODS,
    HOBBIES,
    NAMES,
    OBJECTS,
    RELATIVES,
    WEEKDAYS,
    capital,
    clock_time,
    commas,
    lines,
    number,
    slots,
)

# ------------------------------------------------------------------------------------------------------ lists
CASUAL = lines("""
    hey {name}, can't make it {day}, my {relative} needs the car. sorry!!
    yo {name}, u still got my {object}? need it by {day}
    no way i'm gonna finish the report by {time}, too much stuff going on
    didn't like the {food} at that place in {city} at all, never again
    can u send me the pics from {city}? thx
    gonna be like {minutes} min late, traffic is crazy
    hey, ur {object} is still at my place, wanna pick it up {day}?
    dude the meeting got moved to {time}, nobody told me lol
    so sorry i missed ur call, was out with my {relative}
    {name} kinda messed up the order, we got {minutes} boxes, way too many
    lemme know if {day} works, otherwise no big deal
    the wifi's been down since {time}, can somebody fix it??
""")
FORMAL = lines("""
    We regret to inform you that the event on {day} has been cancelled due to illness.
    Please be advised that the office in {city} will close at {time} on {day}.
    I would be most grateful if you could return the {object} at your earliest convenience.
    It is with great pleasure that we invite you to attend the {hobby} course beginning on {day}.
    Your application has been received and will be processed within {minutes} days.
    Kindly ensure that all personal belongings, including your {object}, are removed by {time}.
    We wish to remind residents that loud activities after {time} are not permitted.
    The undersigned requests permission to be absent on {day} in order to visit a relative in {city}.
    Customers are kindly requested to refrain from bringing food, such as {food}, into the building.
    Please do not hesitate to contact {name} should you require further assistance on {day}.
""")
PLAIN_SUBJECTS = commas("""
my {relative}, {name}, the teacher, our neighbor, the old man, a young woman, the chef, the driver, the whole
team, the manager, a tourist from {city}, the little girl, the doctor, the farmer
""")
# present | past | past participle | object
ACTIONS = tuple(tuple(part.strip() for part in line.split("|")) for line in lines("""
    repairs | repaired | repaired | the {object}
    paints | painted | painted | the {object}
    cooks | cooked | cooked | {food}
    carries | carried | carried | the {object} up the stairs
    finds | found | found | a lost {animal}
    sells | sold | sold | the {object} at the market
    writes | wrote | written | a letter to {name2}
    cleans | cleaned | cleaned | the kitchen
    draws | drew | drawn | a picture of {a_animal}
    feeds | fed | fed | the {animal}
    forgets | forgot | forgotten | the {object} on the bus
    teaches | taught | taught | a class about {hobby}
    buys | bought | bought | a new {object}
    opens | opened | opened | a small shop in {city2}
    breaks | broke | broken | the {object} by accident
    brings | brought | brought | {food} to the party
    loses | lost | lost | the keys in {city2}
    wins | won | won | a prize for {hobby}
"""))
ADVERBIALS = commas("""
every morning, on {day}, after lunch, in the rain, before dinner, at {time}, without any help, in a hurry,
late at night, for the first time, with great care, during the holidays
""")
SECOND_CLAUSES = lines("""
    everybody is surprised|everybody was surprised
    nobody says a word|nobody said a word
    the children laugh|the children laughed
    it takes {minutes} minutes|it took {minutes} minutes
    {name2} takes a photo|{name2} took a photo
    the dog runs away|the dog ran away
    the weather is terrible|the weather was terrible
    we all help|we all helped
    the phone rings|the phone rang
    {name2} pays for it|{name2} paid for it
""")
ERRORS = lines("""
    {name} have {minutes} book about {hobby} and he like them all
    me and {name} was going to {city} last {day}
    she dont know where is the {object}
    yesterday i go to the market and buyed {food}
    their is a {animal} in the garden, its very big
    he has went to {city} with his {relative} too times
    the peoples in {city} is very friendly
    i am agree with {name}, the {object} are to expensive
    can you explain me how works this {object}
    we was waiting since {minutes} minutes for the bus in {city}
    her {relative} didn't ate no {food} on {day}
    i look forward to meet you in {city} on {day}
    this is the most biggest {object} i ever seen
    if i would have time, i will learn {hobby}
    {name} borrow me his {object} on last {day}
    everyone have they're own {object}
""")
NEGATIVE = lines("""
    This {object} is ugly and costs far too much.
    The {hobby} class on {day} was boring and a waste of time.
    Nobody in {city} is friendly, and I cannot stand the {food}.
    {name} is always late and never says sorry.
    I hate waiting {minutes} minutes for a bus.
    You did this wrong again. Do it over by {time}.
    Your report is too long and full of mistakes.
    I will never be good at {hobby}.
    The room was cold, and somebody had left a broken {object} in it.
    Stop asking me about the {object}. I already told you no.
    My {relative} gave me {a_object} for my birthday, and I do not like it at all.
    The service was slow: {minutes} minutes for {food}!
""")
WORDY = lines("""
    In my own personal opinion, I really think that {hobby} is a thing that can help people to relax \
        after a long day.
    Due to the fact that it was raining very heavily, {name} made the decision to stay at home on {day}.
    At this point in time, we do not have any {object}s left in the shop, but we expect to get more of \
        them on {day}.
    The reason why I am writing to you is because I would like to ask whether the {object} is still for sale.
    It is important to note that the train to {city}, which leaves at {time}, is a train that is often \
        very full.
    {name} is a person who always arrives early, and this is something that everybody on the team likes.
    There are many people in {city} who enjoy eating {food}, and they do so on almost every single day \
        of the week.
    I was wondering if it might perhaps be possible for you to lend me your {object} for a period of \
        {minutes} days.
    What we need to do first of all is to start by cleaning the kitchen before we begin to cook {food}.
    My {relative}, who lives in {city}, called me on the phone at {time} in order to tell me about the \
        new {object}.
""")
DIFFICULT = lines("""
    The municipality of {city} has implemented measures to mitigate traffic congestion by {minutes} percent.
    Prior to utilizing the {object}, individuals are obligated to consult the accompanying documentation.
    Insufficient hydration may adversely affect an individual's performance while {hobby}.
    The remuneration of employees is contingent upon the completion of {minutes} hours of labor.
    {name} endeavored to ascertain the location of the {object} subsequent to the meeting on {day}.
    Residents of {city} expressed apprehension regarding the proposed construction.
    The {animal} is a nocturnal creature that predominantly inhabits elevated regions.
    Passengers are required to relinquish their seats to persons with reduced mobility after {time}.
    Consumption of {food} in excessive quantities can be detrimental to one's wellbeing.
    The committee reached a unanimous decision to terminate the {hobby} program by {day}.
""")
SHORT_PAIRS = lines("""
    It was raining.|{name} went for a walk in {city}.
    {name} was tired.|{name} worked until {time}.
    The {object} was old.|It still worked well.
    We missed the bus.|We walked for {minutes} minutes.
    The shop was closed.|{name} could not buy the {object}.
    The {animal} was hungry.|It ate all the {food}.
    {name} studied hard.|{name} did not pass the test on {day}.
    My {relative} lives in {city}.|I visit every {day}.
    The soup was cold.|Nobody complained.
    {name} loves {hobby}.|{name} has no time on {day}.
    The train left at {time}.|We arrived {minutes} minutes later.
    The {object} fell on the floor.|It did not break.
""")
STYLES = commas("""
a friendly email, a news headline, a line from a fairy tale, a tweet, a diary entry, a weather report, a
notice on a door, a question, an advertisement, a children's story, a pirate's speech, a polite request
""")

_INNER = slots(
    name=NAMES[:27], name2=NAMES[27:], day=WEEKDAYS, relative=RELATIVES, object=OBJECTS, time=clock_time,
    city=CITIES[:15],
    city2=CITIES[15:], food=FOODS, minutes=number(5, 95, 5), hobby=HOBBIES, animal=ANIMALS,
)


# -------------------------------------------------------------------------------------------------- sentences
def _from(source):
    """A source of whole sentences: one entry of the list with its slots filled."""
    return lambda rng: rng.choice(source).format(**_INNER(rng))


def _event(rng: random.Random) -> dict[str, str]:
    """One event told in the present and in the past tense, alone and with a second clause."""
    words = _INNER(rng)
    present, past, participle, target = rng.choice(ACTIONS)
    subject = rng.choice(PLAIN_SUBJECTS).format(**words)
    target, adverbial = target.format(**words), rng.choice(ADVERBIALS).format(**words)
    clause, past_clause = rng.choice(SECOND_CLAUSES).format(**words).split("|")
    was = "were" if target in FOODS and target.endswith("s") else "was"
    return {
        "now": capital(f"{subject} {present} {target} {adverbial}."),
        "then": capital(f"{subject} {past} {target} {adverbial}."),
        "now_long": capital(f"{subject} {present} {target} {adverbial}, and {clause}."),
        "then_long": capital(f"{subject} {past} {target} {adverbial}, and {past_clause}."),
        "passive": capital(f"{target} {was} {participle} by {subject}."),
        "style": rng.choice(STYLES), "name": words["name"],
    }


def _pair(rng: random.Random) -> dict[str, str]:
    first, second = _from(SHORT_PAIRS)(rng).split("|")
    third = _from(SHORT_PAIRS)(rng).split("|")[0]
    joined = f"{first[:-1]}, {'and' if second.startswith('It ') else 'but'} {second}"
    return {"first": first, "second": second, "third": third, "joined": joined,
            "word": rng.choice(("because", "although", "so", "when", "but", "while"))}


# --------------------------------------------------------------------------------------------------- families
FORMALITY = Family("more_formal", "rewrite", (
    "Rewrite this message so that it is polite and professional:\n\n{casual}",
    "Make this sound formal, in one sentence: \"{casual}\"",
    "My boss should not see this version. Please write a proper one.\n\n{casual}",
    "{casual}\n\nTurn the text above into a short business email of at most three sentences.",
    "Correct the spelling and style of this chat message, but keep it short: {casual}",
    "Rewrite without slang or abbreviations. Output only the new text.\nText: {casual}",
    "How would a very polite person say this? \"{casual}\" One sentence.",
), slots(casual=_from(CASUAL)))

FRIENDLINESS = Family("more_casual", "rewrite", (
    "Say this in a relaxed, friendly way:\n\n{formal}",
    "Rewrite as a text message to a friend: \"{formal}\"",
    "{formal}\n\nThis is too stiff. Make it warm and short.",
    "Turn this into everyday English, in one sentence: {formal}",
    "Shorten to at most ten words, informal: {formal}",
    "How would a teenager say \"{formal}\"? One sentence, please.",
    "Original: {formal}\nCasual version:",
), slots(formal=_from(FORMAL)))

TENSE = Family("tense", "rewrite", (
    "Rewrite in the past tense: {now}",
    "Put this sentence in the future tense: {then}",
    "Change to the present tense. Only the sentence.\n\n{then_long}",
    "Which tense is this sentence in? Then rewrite it in the past: \"{now_long}\"",
    "{now_long}\n\nTell the same thing as if it happened last year, in one sentence.",
    "Make this negative: {then}",
    "Turn this statement into a yes-or-no question: {now}",
    "Rewrite with \"I\" as the person who does it: {then}",
), _event)

VOICE = Family("voice_and_style", "rewrite", (
    "Change this to the active voice: {passive}",
    "Rewrite this sentence as {style}: {then}",
    "Tell this as {style}, one sentence only:\n\n{now_long}",
    "Say the same thing in different words: \"{then_long}\"",
    "Add one adjective to each noun: {then}",
    "Start this sentence with a different word but keep the meaning: {then_long}",
    "Write this as something {name} would say to a friend: \"{passive}\"",
    "Expand this sentence with one detail, at most 25 words: {now}",
), _event)

GRAMMAR = Family("grammar", "rewrite", (
    "Correct the grammar: {error}",
    "Fix the mistakes in this sentence. Give only the corrected sentence.\n\n{error}",
    "Proofread this: \"{error}\"",
    "{error}\n^ is this correct English? If not, write it correctly.",
    "I am learning English. Please correct my sentence and name one mistake: {error}",
    "Rewrite properly, with a capital letter and a full stop: {error}",
    "Teacher's version of \"{error}\":",
), slots(error=_from(ERRORS)))

POSITIVE = Family("kinder", "rewrite", (
    "Rewrite this in a positive way: {negative}",
    "Make this complaint polite, in one or two sentences: \"{negative}\"",
    "{negative}\n\nSay it more kindly.",
    "Turn this into constructive feedback of at most 25 words: {negative}",
    "I wrote this when I was angry: \"{negative}\" Write a calm version.",
    "Give the opposite of this statement: {negative}",
    "Rewrite as a polite question: {negative}",
), slots(negative=_from(NEGATIVE)))

CONCISE = Family("shorter", "rewrite", (
    "Make this shorter: {wordy}",
    "Cut this down to at most ten words:\n\n{wordy}",
    "Remove the filler words. Keep the meaning.\n{wordy}",
    "\"{wordy}\" Say this in one short sentence.",
    "Rewrite as a note for the fridge: {wordy}",
    "What is the main point here? Write it in under twelve words. {wordy}",
    "Edit for brevity, output only the new sentence: {wordy}",
), slots(wordy=_from(WORDY)))

SIMPLE = Family("simpler", "rewrite", (
    "Rewrite in simple words: {difficult}",
    "Explain this sentence to a child in one sentence:\n\n{difficult}",
    "Say this in easy English: \"{difficult}\"",
    "{difficult}\n\nReplace every long word with a short one.",
    "What does this mean in everyday language? One sentence. {difficult}",
    "Split this into two short, simple sentences: {difficult}",
), slots(difficult=_from(DIFFICULT)))

JOIN = Family("join_and_split", "rewrite", (
    "Join these two sentences into one: {first} {second}",
    "Combine with the word \"{word}\": {first} {second}",
    "Split into two sentences: {joined}",
    "Write one smooth sentence from these notes:\n- {first}\n- {second}",
    "Swap the order of these sentences and add a linking word: {first} {second}",
    "Turn the three facts into one short paragraph: {first} {second} {third}",
    "Rewrite so that no word occurs twice: {first} {second}",
), _pair)

FAMILIES = (FORMALITY, FRIENDLINESS, TENSE, VOICE, GRAMMAR, POSITIVE, CONCISE, SIMPLE, JOIN)
