"""Summarise: authored texts of 30-90 words, composed clause by clause, and requests for their gist."""

import random

from scripts.families import Family
from scripts.families.words import (
    ANIMALS,
    CITIES,
    FOODS,
    HOBBIES,
    JOBS,
    NAMES,
    OBJECTS,
    RELATIVES,
    WEEKDAYS,
    a,
    capital,
    clock_time,
    commas,
    date,
    lines,
    number,
    slots,
)

# ------------------------------------------------------------------------------------------------------ lists
TEAMS = commas("""
sales, design, support, finance, kitchen, delivery, research, garden, marketing, library, repair
""")
PROJECTS = commas("""
the new website, the spring catalog, the office move, the customer survey, the training week, the summer fair,
the delivery app, the annual report, the staff handbook, the open day, the recycling plan, the price list
""")
BUILDINGS = commas("""
the swimming pool, the town library, the sports hall, the post office, the bridge on Mill Street, the city
museum, the community center, the train station, the school kitchen, the parking garage, the public garden,
the ice rink
""")
FEATURES = lines("""
    It folds flat and fits in a small bag
    The battery lasts up to {hours} hours
    It weighs only {hours} kilograms
    It is made from recycled plastic
    The cover can be washed at {degrees} degrees
    It comes with a {years}-year warranty
    It works indoors and outdoors
    You can set it up in {hours} minutes without tools
    It is available in red, blue and grey
    A spare part is included
""")
PRODUCTS = commas("""
camping chair, desk lamp, rain jacket, water bottle, travel pillow, bicycle light, coffee grinder, backpack,
fan, kitchen scale, baby carrier, garden hose, radio, yoga mat, suitcase, lunch box, headset, alarm clock
""")
DOWNSIDES = lines("""
    Some buyers say that the instructions are hard to read.
    It is not suitable for children under {years}.
    A few customers found the color lighter than in the photo.
    The lid is a little stiff at first.
    It does not come with batteries.
    Delivery takes about {hours} days.
""")

_INNER = slots(
    name=NAMES[:27], name2=NAMES[27:], day=WEEKDAYS, day2=WEEKDAYS, date=date, time=clock_time,
    city=CITIES[:15],
    city2=CITIES[15:], team=TEAMS, project=PROJECTS, building=BUILDINGS, product=PRODUCTS, hours=number(2,
                                                                                                        12),
    degrees=number(30, 60, 10), years=number(2, 6), percent=number(5, 60, 5), money=number(15, 180, 5),
    people=number(14, 90), relative=RELATIVES, food=FOODS, hobby=HOBBIES, animal=ANIMALS, object=OBJECTS,
    job=JOBS,
)

# A grammar is a list of steps, one clause of each in order; a step that offers "" may be left out.
EMAIL = (
    lines("""
        Hi {name},
        Dear {name},
        Hello {name}, I hope you are well.
        {name}, just a quick update.
    """),
    lines("""
        I wanted to let you know that {project} is running about {hours} days late.
        We talked about {project} on {day}, and the {team} team would like to change the plan.
        The {team} team has finished the first part of {project}.
        The supplier from {city} called: the {product}s for {project} will not arrive before {day}.
        We have a problem with {project}: {people} people signed up, but we have only {hours} chairs.
    """),
    lines("""
        The main reason is that two people are ill and {name2} is on holiday until {date}.
        {name2} found an error in the numbers, so we have to check all {people} entries again.
        The costs went up by {percent} percent because of the new prices.
        {name2} from {city2} has offered to help for {hours} hours a week.
        Our customers asked for it, and {name2} agrees with them.
    """),
    lines("""
        Could you send me the missing files by {time} on {day2}?
        Please tell me by {day2} if this is fine with you.
        Can we meet on {day2} at {time} to decide what to do next?
        I suggest that we move the deadline to {date}.
        You do not have to do anything now, but please keep {day2} free.
    """),
    ("", "I have attached the list.", "Lunch will be provided.",
     "The meeting room is booked for {hours} hours."),
    ("Best, {name2}", "Thanks, {name2}", "Kind regards, {name2}"),
)
NOTICE = (
    lines("""
        From {date}, {building} will be closed for repairs.
        Please note that {building} has new opening hours from {date}.
        On {day}, {building} will host a free {hobby} event for families.
        The lift at {building} is out of order.
        Starting on {day}, visitors of {building} need a ticket, which costs ${hours}.
    """),
    lines("""
        The work is expected to take {hours} weeks and will be noisy in the morning.
        The doors open at {time}, and the last entry is one hour before closing.
        About {people} places are available, and you can register at the front desk.
        Use the side entrance on {day2}, because the main door will be locked.
        Parking is limited, so please come by bus or by bicycle.
    """),
    lines("""
        Dogs are not allowed, with the exception of guide dogs.
        Children under {years} must be accompanied by an adult.
        Food and drinks may not be taken inside.
        Lost items, such as {a_object} found last week, can be collected at the desk.
        Members pay {percent} percent less.
    """),
    ("For questions, ask {name} at the office.", "We are sorry for the inconvenience.",
     "More information will follow on {day2}.", "Call {name} if you need help to get in."),
)
NEWS = (
    lines("""
        The city of {city} plans to rebuild {building} for ${money} million.
        {a_animal} stopped traffic in {city} for {hours} hours on {day}.
        {a_job} from {city} has won a national prize for {hobby}.
        Heavy rain flooded several streets in {city} on {day} night.
        Bus drivers in {city} will stop work for one day on {day}.
        A small bakery in {city} that sells {food} has become famous after a video was seen {people},000 \
            times.
    """),
    lines("""
        {name}, who lives nearby, said that nobody had expected it.
        Mayor {name} called it an important day for the region.
        According to {name2}, a local {job}, {percent} percent of the people support the idea.
        About {people} people had to change their plans.
        The police asked drivers to avoid the center until {time}.
    """),
    lines("""
        Last year a similar thing happened in {city2}, where it cost about ${money},000.
        Schools stayed open, but {building} had to close early.
        Some residents worry about noise and higher prices.
        Volunteers brought {food} and blankets to those who were waiting.
        Experts say that it could happen again within {years} years.
    """),
    lines("""
        A decision is expected on {date}.
        The council will discuss the matter on {day2}.
        Nobody was hurt.
        A second event is planned for {date}.
        The mayor's office did not answer questions.
    """),
)
DIARY = (
    lines("""
        Woke up at {time} because the neighbor's {animal} was loud again.
        Today was the first day of my {hobby} course.
        {day}. I missed the bus by one minute and had to walk for {hours}0 minutes.
        My {relative} came to visit and brought {food}.
        We arrived in {city} after {hours} hours on the train.
    """),
    lines("""
        At work, {name} asked me to help with {project}, and I said yes although I have no time.
        I met {name} at the market, and we talked about {hobby} for an hour.
        I tried to repair the {object}, but now it looks worse than before.
        It rained all day, so we stayed inside and cooked {food}.
        In the afternoon I lost my {object}, and {name} found it under a bench.
    """),
    lines("""
        I was angry at first, but later I had to laugh.
        I noticed that I do not need much to be happy.
        I spent ${money}, which is more than I wanted.
        I still think about what {name2} told me last week.
        My feet hurt, but it was worth it.
    """),
    lines("""
        Tomorrow I want to call my {relative} and go to bed early.
        On {day2} I will try again.
        Now I am tired and will read a few pages.
        I hope that next week will be quieter.
    """),
)
MINUTES = (
    ("Meeting of the {team} team, {date}.", "Notes, {team} team, {day} {time}.",
     "{project}: weekly call on {day}."),
    lines("""
        Present: {name}, {name2} and {years} others.
        {name} was absent; {name2} took notes.
        {name} led the meeting.
    """),
    lines("""
        {name} reported that sales in {city} rose by {percent} percent.
        {name2} showed the first draft of {project}.
        The team discussed the broken {object} in the kitchen.
        {people} customers complained about slow delivery.
        The budget for {project} is ${money},000, which is less than planned.
    """),
    lines("""
        It was decided to buy {hours} new {product}s.
        The group agreed to test the idea in {city2} first.
        Nobody wanted to work on {day2}, so the date stays open.
        {name2} will write to the supplier by {day2}.
        The price will go up to ${money}.
    """),
    ("Next meeting: {date} at {time}.", "{name} will book a room for {day2}.",
     "Open question: who tells the customers?"),
)
PRODUCT = (
    ("Our new {product} is made for people who love {hobby}.",
     "Meet the {product} that {people},000 customers use every day.",
     "The {product} is our answer to a simple problem: too much weight and too little space."),
    FEATURES[:5], FEATURES[5:],
    ("It costs ${money}, or ${hours}5 for members.", "The price is ${money}, and delivery to {city} is free.",
     "Until {date} it is {percent} percent cheaper."),
    DOWNSIDES,
    ("", "Order before {day} and get it by {day2}.", "{name} from {city} writes: \"I use it every week.\""),
)
STORY = (
    lines("""
        {name} found an old {object} in the attic and wanted to throw it away.
        A small {animal} lived behind a bakery in {city}.
        {name} and {name2} both wanted to win the {hobby} contest in {city}.
        Every {day}, {a_job} named {name} fed {a_animal} in the park.
        In a village near {city}, nobody had ever seen {a_object}.
    """),
    lines("""
        One day a stranger offered ${money} for it, and everybody was surprised.
        Then winter came, and there was not enough to eat.
        On the way they got lost and had to share one {object}.
        But on {date} something was different: the gate was locked.
        {name2} laughed at this and told the whole street.
    """),
    lines("""
        After {hours} days of doubt, {name} decided to tell the truth.
        They worked together for {hours} hours and forgot why they had argued.
        A child from {city2} had the best idea of all: to ask for help.
        It took a long time, but at last the door opened.
        {name2} felt sorry and brought {food}.
    """),
    lines("""
        From that day on, they were friends.
        Nobody won, but everyone was happy.
        The {object} still stands in the window today.
        And {name2} never laughed at anyone again.
    """),
)


def text(grammar, rng: random.Random) -> str:
    """One clause of each step, with one set of names and places for the whole text."""
    words = _INNER(rng)
    clauses = (capital(rng.choice(step).format(**words)) for step in grammar)
    ends = (clause if clause.endswith((".", ",", "?", "!",
                                       '"')) or clause.endswith(words["name2"]) else clause + "."
            for clause in clauses if clause)
    return " ".join(ends)


def _of(grammar, **more):
    """A fill with the slot `text` and further slots."""
    return slots(text=lambda rng: text(grammar, rng), **more)


# --------------------------------------------------------------------------------------------------- families
EMAILS = Family("emails", "summarise", (
    "Summarize this email in one sentence:\n\n{text}",
    "{text}\n\nWhat does the sender want? Answer in one short sentence.",
    "Write a subject line of at most eight words for this email:\n\n{text}",
    "tl;dr?\n\n{text}",
    "I have no time to read this. Tell me in under 20 words what I have to do.\n\n{text}",
    "Summarize the following email for {reader} in one or two sentences.\n\n{text}",
    "What is the problem in this email, and what is the next step? One line each.\n\n{text}",
    "Turn this email into two short bullet points:\n{text}",
), _of(EMAIL, reader=("my boss", "a colleague who was away", "the whole team", "a new employee",
                      "our customer")))

NOTICES = Family("notices", "summarise", (
    "Summarize this notice in one sentence:\n\n{text}",
    "Shorten this announcement to at most 20 words:\n\n{text}",
    "{text}\n\nWhat changes for visitors? One sentence.",
    "Write a headline for this notice, six words or fewer:\n\n{text}",
    "Rewrite the notice as a text message to a friend, one sentence:\n\n{text}",
    "Which two facts in this notice matter most? Two short lines.\n\n{text}",
    "Notice: {text}\n\nWhat does it say, in short?",
), _of(NOTICE))

NEWS_BRIEFS = Family("news", "summarise", (
    "Summarize this news item in one sentence:\n\n{text}",
    "Write a headline for this story:\n\n{text}",
    "{text}\n\nGive the gist in at most 15 words.",
    "Who did what, and where? Answer in one sentence.\n\n{text}",
    "Retell this news for a child in one or two sentences:\n\n{text}",
    "What happens next, according to this article? One sentence.\n\n{text}",
    "Please condense the article below into a single sentence for a radio bulletin.\n\n{text}",
    "Name the topic of this text in three words or fewer.\n\n{text}",
), _of(NEWS))

DIARIES = Family("diary", "summarise", (
    "Summarize this diary entry in one sentence:\n\n{text}",
    "How does the writer feel at the end? One sentence.\n\n{text}",
    "{text}\n\nGive this entry a title of at most five words.",
    "Retell this in the third person in one or two sentences. Call the writer {name}.\n\n{text}",
    "What was the best moment of this day? Answer in one sentence.\n\n{text}",
    "Sum up the day in ten words:\n\n{text}",
    "My friend {name} wrote this. What is it about? Keep it short.\n\n{text}",
), _of(DIARY, name=NAMES))

MEETINGS = Family("meetings", "summarise", (
    "Summarize these meeting notes in one sentence:\n\n{text}",
    "What was decided in this meeting? Answer in one sentence.\n\n{text}",
    "{text}\n\nWrite the main result in one short sentence.",
    "I missed this meeting. What do I need to know? Two sentences at most.\n\n{text}",
    "Turn the notes into a two-sentence update for the boss:\n\n{text}",
    "List the decision and the next date, one line each.\n\n{text}",
    "Notes:\n{text}\nSummary (max 20 words):",
), _of(MINUTES))

PRODUCTS_TEXT = Family("products", "summarise", (
    "Summarize this product description in one sentence:\n\n{text}",
    "Name one advantage and one disadvantage of this product. One line each.\n\n{text}",
    "{text}\n\nWrite a slogan of at most eight words for it.",
    "Would this be right for {buyer}? Answer in one sentence.\n\n{text}",
    "Shorten the text to a 15-word advertisement:\n\n{text}",
    "What is being sold here, and for how much? One sentence.\n\n{text}",
    "Give {buyer} the key facts in two short sentences.\n\n{text}",
), _of(PRODUCT, buyer=[*(a(job) for job in JOBS), "a student", "a family", "an old couple", "a camper"]))

STORIES = Family("stories", "summarise", (
    "Summarize this story in one sentence:\n\n{text}",
    "What is the moral of this story? One short sentence.\n\n{text}",
    "{text}\n\nSuggest a title for the story. Only the title.",
    "Tell the story again in at most 25 words:\n\n{text}",
    "Who is the main character, and what changes for them? One sentence.\n\n{text}",
    "Write one sentence that says how the story ends.\n\n{text}",
    "Explain to {reader} what this story is about, in one sentence.\n\n{text}",
), _of(STORY, reader=("a five-year-old", "a teacher", "my grandmother", "a librarian", "a film maker",
                      "a busy editor")))

FAMILIES = (EMAILS, NOTICES, NEWS_BRIEFS, DIARIES, MEETINGS, PRODUCTS_TEXT, STORIES)
