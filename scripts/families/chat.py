"""Chat: everyday questions, advice, small talk and short messages."""

from scripts.families import Family
from scripts.families.words import (
    ANIMALS,
    AUDIENCES,
    CITIES,
    CONCEPTS,
    COUNTRIES,
    FOODS,
    HOBBIES,
    JOBS,
    NAMES,
    NATURE,
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
GOALS = lines("""
    wake up earlier
    save money on groceries
    drink more water
    remember people's names
    stop biting nails
    spend less time on the phone
    fall asleep faster
    keep a desk tidy
    read more books
    feel less nervous before a talk
    learn to cook simple meals
    stay focused while studying
    make new friends
    get along with a noisy neighbor
    exercise without a gym
    write better emails
    stop putting things off
    eat more vegetables
    keep house plants alive
    stay calm in traffic
    improve handwriting
    plan the week
    ask for a raise
    practise a language every day
    use less plastic
    say no politely
    pack lighter for trips
    make a phone battery last all day
    be on time for work
    run five kilometers
    keep a diary
    get a child to go to bed
    stop losing keys
    reduce an electricity bill
""")
LIMITS = lines("""
    I only have ten minutes a day.
    I do not want to spend any money.
    I have a small apartment.
    I work night shifts.
    I have two young children.
    I travel a lot for work.
    I have tried apps and they did not help.
    I get bored easily.
    I am 68 years old.
    I am still a student.
    I live alone.
    I start on {day}.
""")
# Each feeling comes with an event that can cause it.
BAD_FEELINGS = commas("""
nervous, lonely, tired, guilty, worried, confused, annoyed, sad, disappointed, stressed
""")
BAD_EVENTS = lines("""
    my best friend is moving to {city}
    my team lost the final
    I forgot my {relative}'s birthday
    my cat is at the vet
    I have an exam on {day}
    nobody came to my party
    my flight to {city} was cancelled
    I burned the {food}
    I have to give a speech on {day}
    my {relative} is ill
    I had a fight with my {relative}
    {hobby} is harder than I thought
    my bike was stolen in {city}
    I did not get the job in {city}
    my {relative} does not answer my calls
""")
GOOD_FEELINGS = commas("proud, happy, excited, relieved, surprised, grateful, hopeful")
GOOD_EVENTS = lines("""
    I start a new job on {day}
    I passed my driving test
    I got a letter from my {relative}
    I finally finished my project
    I won a prize for {hobby}
    we are moving to {city}
    my {relative} is coming to visit on {day}
    I cooked {food} without any help
    I found my lost wallet in {city}
    my {relative} asked me to teach {hobby}
""")
CHOICES = lines("""
    tea|coffee|the morning
    a bus|a train|a trip to {city}
    a cat|a dog|a small apartment
    running|swimming|a sore knee
    a paper book|an e-reader|a long trip
    a laptop|a tablet|school work
    {food}|{food2}|a family dinner
    {hobby}|{hobby2}|a rainy weekend
    renting|buying a house|a young couple
    cash|a card|a trip to {city}
    a phone call|an email|saying sorry to my {relative}
    a backpack|a suitcase|five days in {city}
    glasses|contact lenses|{hobby}
    the mountains|the beach|a holiday with my {relative}
    flowers|chocolate|my {relative}'s birthday
    a quiet evening|a party|my birthday
    studying at night|studying in the morning|an exam on {day}
    plain rice|potatoes|eating with {food}
""")
ERRANDS = lines("""
    the meeting
    dinner at my place
    our {hobby} class
    the dentist appointment
    the school concert
    your birthday party
    the train to {city}
    the job interview
    lunch with my {relative}
    the football match
""")
REASONS = lines("""
    the bus is late
    my car will not start
    I have a cold
    I have to work longer
    my {relative} is visiting
    I lost my keys
    there is heavy snow
    I have to take my {relative} to the doctor
    I got the day wrong
""")
PRODUCTS = commas("""
a raincoat, a watch, a desk lamp, a birthday card, a garden hose, a winter coat, a coffee machine, a phone
case, a tent, a school bag, a frying pan, a bicycle helmet, a pillow, a board game, a wool scarf, a microphone
""")
COMPLAINTS = lines("""
    it arrived with a scratch
    it is too small
    the color is not what I ordered
    it stopped working after two days
    I received two instead of one
    a part is missing
    it has not arrived yet
    I no longer need it
    it is too loud
    I lost the receipt
""")
SIGHTS = commas("""
a museum, a park, a market, a quiet cafe, a bookshop, a viewpoint, a playground, a bakery, a concert hall, a
bridge
""")


def _nested(source):
    """A source whose entries may hold slots themselves ({city}, {relative}, ...)."""
    inner = slots(
        city=CITIES, relative=RELATIVES, day=WEEKDAYS, hobby=HOBBIES[:14], hobby2=HOBBIES[14:],
        food=FOODS[:12], food2=FOODS[12:],
    )
    return lambda rng: rng.choice(source).format(**inner(rng))


def _feeling(rng):
    """A feeling and an event that go together, the event also with a capital letter."""
    feelings, events = rng.choice(((BAD_FEELINGS, BAD_EVENTS), (GOOD_FEELINGS, GOOD_EVENTS)))
    event = _nested(events)(rng)
    return {"feeling": rng.choice(feelings), "event": event, "told": capital(event),
            "name": rng.choice(NAMES)}


def _choice(rng):
    first, second, purpose = _nested(CHOICES)(rng).split("|")
    return {"first": first, "second": second, "purpose": purpose, "name": rng.choice(NAMES)}


# --------------------------------------------------------------------------------------------------- families
ADVICE = Family("advice", "chat", (
    "How can I {goal}? Give me one short tip.",
    "I am {a_job} and I want to {goal}. Name one thing to try this week, in one sentence.",
    "I want to {goal}. {limit} What do you suggest? Two sentences please.",
    "Name three small habits that help someone {goal}, one line each. {limit}",
    "What is the most common mistake people make when they try to {goal}? One short sentence, I have to "
        "tell {a_job}.",
    "My {relative} always asks me how to {goal}. What should I say? Keep it under 30 words.",
    "quick question: best way to {goal}? {limit} one sentence pls",
    "Give me a one-sentence motto for {a_job} who wants to {goal}.",
), slots(goal=GOALS, job=JOBS, limit=_nested(LIMITS), relative=RELATIVES))

EXPLAIN = Family("explain", "chat", (
    "Explain {concept} to {audience} in two sentences.",
    "What is {concept}? One sentence, as you would say it to {audience}.",
    "My {relative} asked me about {concept} and I had no answer. What is a simple way to put it in 40 words "
        "or fewer?",
    "Give {audience} one everyday example of {concept}, in one sentence.",
    "Why does {concept} matter to {a_job}? Answer in one or two sentences.",
    "Can you compare {concept} to something in a kitchen? One sentence for {audience}.",
    "True or false: most people meet {concept} in daily life. Say which, and give one reason {audience} "
        "would follow.",
    "in plain words, what does {concept} mean? i'm {a_job}, no jargon, keep it short",
), slots(concept=CONCEPTS, audience=AUDIENCES, relative=RELATIVES, job=JOBS))

GIFTS = Family("recommend", "chat", (
    "Suggest one gift for my {relative}, who loves {hobby}. Answer in one sentence.",
    "I have ${money} to spend on my {relative}, who enjoys {hobby}. Name one present in at most ten words.",
    "What should I cook for my {relative} on {day}? We both like {food}. Answer with the name of one dish.",
    "Recommend a free activity for someone who likes {hobby} and lives in {city}. One sentence.",
    "Give me three short ideas for {a_day} evening with my {relative}. We like {hobby}. Use at most five "
        "words for each.",
    "I am visiting {city} on {day} with my {relative}. What is one thing we should pack? Short answer.",
    "What drink goes well with {food}? My {relative} does not drink alcohol. Answer in a short sentence.",
    "My {relative} wants to start {hobby}. What is the first thing to buy for under ${money}? One short "
        "sentence.",
), slots(relative=RELATIVES, hobby=HOBBIES, money=number(10, 90, 5), day=WEEKDAYS, food=FOODS, city=CITIES))

FEELING = Family("feelings", "chat", (
    "I feel {feeling} because {event}. Say something kind in one or two sentences.",
    "Guess what, {event}! I'm a bit {feeling}.",
    "Hi! I'm {name}. {told}, so I feel {feeling} today. Any thoughts? Please keep it brief.",
    "My friend {name} told me this: \"{told}, and I feel {feeling}.\" What could I reply in one sentence?",
    "Is it normal to be {feeling} when {event}? Answer in two short sentences.",
    "{told}. Write me one line for a card that starts with \"{name}, you\".",
    "Tell me one small thing I can do tonight. I'm {feeling}. {told}.",
), _feeling)

MESSAGE = Family("messages", "chat", (
    "Text {name} in one sentence that I will be {minutes} minutes late for {errand} because {reason}.",
    "Help me cancel {errand} with {name}. The reason is that {reason}. One friendly sentence, no greeting.",
    "Write a short note to {name} to move {errand} from {day} to another day, in one sentence. Sign it "
        "{name2}.",
    "What can I text {name} to thank them for coming to {errand} on {day}? Max 25 words.",
    "Draft a reminder for {name} about {errand} on {day} at {time}. Two sentences at most.",
    "{name} missed {errand} because {reason}. Write a kind one-line reply from {name2}.",
    "Invite {name} to {errand} on {day} at {time}, in one short sentence.",
    "Please write a voicemail of about 30 words: {name2} calls {name}, {reason}, so {errand} must start at "
        "{time}.",
), slots(name=NAMES[:27], name2=NAMES[27:], minutes=number(5, 60, 5), errand=_nested(ERRANDS),
         reason=_nested(REASONS), day=WEEKDAYS, time=clock_time))

DECIDE = Family("decide", "chat", (
    "{first} or {second} for {purpose}? Pick one and give one reason.",
    "I can't decide between {first} and {second}. It is for {purpose}. What would you choose? Answer in one "
        "sentence.",
    "Give one advantage of {first} over {second} for {purpose}, in one sentence.",
    "For {purpose}, {name} says that {first} is always better than {second}. Disagree politely in one "
        "sentence.",
    "Make a two-line comparison of {first} and {second} for {purpose}. Start each line with the name of the "
        "option.",
    "For {purpose}, {name} wants {first} and I want {second}. Suggest a fair compromise in one sentence.",
    "Write one question that helps me choose between {first} and {second} for {purpose}.",
), _choice)

FACTS = Family("quick_facts", "chat", (
    "What is the capital of {country}, and what is one food people eat there?",
    "What does {a_job} do all day? Answer in one or two sentences for {audience}.",
    "Tell {audience} one surprising fact about {animal}s. One sentence.",
    "Which is usually bigger, {a_animal} or {a_animal2}? Answer in one sentence.",
    "What do {animal}s eat, and where do they live? One sentence.",
    "Name three things {audience} might know about {country}. Only a short list.",
    "In which continent is {country}, and is it near the sea? Keep it to one sentence.",
    "What tool does {a_job} use most often? I need it for a quiz for {audience}. One sentence.",
    "Write one quiz question about {animal}s or {nature} for {audience}, then its answer.",
), slots(country=COUNTRIES, job=JOBS, animal=ANIMALS[:15], nature=NATURE, audience=AUDIENCES,
         animal2=ANIMALS[15:]))

SHOP_DESK = Family("shop_desk", "chat", (
    "Hello, I bought {product} on {day} and {complaint}. What can I do? Briefly, please.",
    "Do you have {product} in {color}? I need it by {day}.",
    "My name is {name}. I ordered {product} and {complaint}.",
    "I'd like to return {product} because {complaint}. Is {day} too late?",
    "What are your opening hours on {day}? I want to pick up {product}.",
    "Can you recommend {product} for my {relative}? My budget is ${money}.",
), slots(product=PRODUCTS, day=WEEKDAYS, complaint=COMPLAINTS, name=NAMES, relative=RELATIVES,
         money=number(15, 120, 5), color=commas("red, blue, green, black, white, grey, yellow")),
    system="You work at the help desk of a small shop. Reply in one or two friendly sentences.")

GUIDE = Family("city_guide", "chat", (
    "I have {hours} hours in {city} and I like {hobby}. Where should I go? One place only.",
    "Is there {sight} in {city} where I can take my {relative}?",
    "How do I get from the station to {sight} in {city}?",
    "What is the weather in {city} usually like in summer? I plan to go on {a_day}.",
    "We are {hours} people and we love {food}. What kind of place should we look for in {city}?",
    "Is {city} safe to walk around at night? My {relative} is worried.",
), slots(hours=number(2, 9), city=CITIES, hobby=HOBBIES, sight=SIGHTS, relative=RELATIVES, food=FOODS,
         day=WEEKDAYS),
    system="You are a travel guide. Give one suggestion in at most 40 words.")

FAMILIES = (ADVICE, EXPLAIN, GIFTS, FEELING, MESSAGE, DECIDE, FACTS, SHOP_DESK, GUIDE)
