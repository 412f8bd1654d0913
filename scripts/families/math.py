"""Math: arithmetic and short word problems whose numbers work out (whole, positive results)."""

import random

from scripts.families import Family
from scripts.families.words import CITIES, NAMES, commas

# ------------------------------------------------------------------------------------------------------ lists
GOODS = commas("""
apples, pencils, notebooks, eggs, oranges, stickers, cookies, tickets, candles, books, cups, plants, marbles,
balloons, stamps, bananas, postcards, batteries, towels, muffins, tomatoes, bricks, seeds, buttons, bottles,
crayons
""")
CONTAINERS = commas("boxes, bags, baskets, shelves, trays, jars, crates, drawers, tables, rows")
PAIRS = (
    ("notebook", "pen"), ("burger", "juice"), ("shirt", "cap"), ("book", "magazine"), ("lamp", "bulb"),
    ("pizza", "salad"), ("ball", "whistle"), ("plate", "fork"), ("ticket", "snack"), ("comb", "towel"),
    ("chair", "cushion"), ("plant", "pot"), ("kite", "rope"), ("cake", "candle"), ("bag", "key ring"),
)
ROOMS = commas("""
garden, room, field, carpet, poster, playground, wall, parking lot, blanket, table top, window, pool
""")
VEHICLES = commas("train, bus, car, truck, tram, taxi, van, motorcycle")
EVENTS = commas("""
film, lesson, meeting, concert, flight, football match, show, test, hike, play, bus ride, workshop, nap, tour,
party
""")
SAMPLES = commas("""
test scores, temperatures, ages, race times in minutes, points, heights in centimeters, daily sales
""")
SALE_ITEMS = commas("""
jacket, bicycle, phone, pair of shoes, sofa, watch, tent, desk, camera, guitar, suitcase, coat, printer,
carpet, bed
""")


def _two_names(rng: random.Random) -> dict[str, str]:
    first, second = rng.sample(NAMES, 2)
    return {"name": first, "name2": second}


# --------------------------------------------------------------------------------------------------- fillings
def _arithmetic(rng):
    big, small = rng.randrange(30, 900), rng.randrange(11, 29)
    factor, divisor, quotient = rng.randrange(3, 26), rng.randrange(3, 13), rng.randrange(4, 41)
    return {"big": str(big), "small": str(small), "factor": str(factor), "divisor": str(divisor),
            "dividend": str(divisor * quotient), "third": str(rng.randrange(2, 30)), **_two_names(rng)}


def _shopping(rng):
    first, second = rng.choice(PAIRS)
    price, price2 = rng.randrange(3, 16), rng.randrange(2, 9)
    count, count2 = rng.randrange(2, 9), rng.randrange(2, 7)
    total = price * count + price2 * count2
    # The next multiple of ten above the bill, plus ten: there is always change to give.
    paid = (total // 10 + 1) * 10 + rng.choice((0, 10))
    return {"first": first, "second": second, "price": str(price), "price2": str(price2), "count": str(count),
            "count2": str(count2), "paid": str(paid), **_two_names(rng)}


def _sharing(rng):
    groups, each = rng.randrange(3, 13), rng.randrange(3, 16)
    return {"groups": str(groups), "each": str(each), "total": str(groups * each),
            "rest": str(rng.randrange(1, groups)),
            "total_rest": str(groups * each + rng.randrange(1, groups)), "goods": rng.choice(GOODS),
            "containers": rng.choice(CONTAINERS), **_two_names(rng)}


def _travel(rng):
    speed, hours = rng.choice((30, 35, 40, 45, 50, 60, 70, 80, 90, 100, 110, 120)), rng.randrange(2,
                                                                                                          8)
    city, city2 = rng.sample(CITIES, 2)
    return {"speed": str(speed), "hours": str(hours), "distance": str(speed * hours), "city": city,
            "city2": city2,
            "vehicle": rng.choice(VEHICLES), "extra": str(rng.randrange(10, 60, 5)),
            "faster": str(speed + rng.choice((5, 10, 20))), "name": rng.choice(NAMES)}


def _percent(rng):
    # Prices in multiples of 20 and percentages in multiples of 5: every part is a whole number.
    percent = rng.choice((5, 10, 15, 20, 25, 30, 40, 50, 60, 75))
    return {"percent": str(percent), "price": str(rng.randrange(20, 500, 20)), "item": rng.choice(SALE_ITEMS),
            "people": str(rng.randrange(20, 600, 20)), "goods": rng.choice(GOODS), **_two_names(rng)}


def _shapes(rng):
    width, length = rng.randrange(2, 20), rng.randrange(20, 40)
    return {"width": str(width), "length": str(length), "side": str(rng.randrange(3, 31)),
            "area": str(width * length), "perimeter": str(2 * (width + length)), "room": rng.choice(ROOMS),
            "cost": str(rng.randrange(2, 9)), "height": str(rng.randrange(2, 12)), "name": rng.choice(NAMES)}


def _clock(rng):
    hour, minute, duration = rng.randrange(1, 9), rng.randrange(0, 60, 5), rng.randrange(25, 180, 5)
    end = hour * 60 + minute + duration
    hours, rest = divmod(duration, 60)
    return {"start": f"{hour}:{minute:02d} pm", "end": f"{end // 60}:{end % 60:02d} pm",
            "duration": str(duration), "long": f"{hours} h {rest} min" if hours else f"{rest} min",
            "event": rng.choice(EVENTS), "hours": str(rng.randrange(2, 10)),
            "days": str(rng.randrange(3, 29)), "break_": str(rng.randrange(5, 25, 5)), **_two_names(rng)}


def _series(rng):
    start, step, ratio = rng.randrange(1, 40), rng.randrange(2, 13), rng.choice((2, 3))
    low = rng.randrange(1, 6)
    rising = [start + i * step for i in range(5)]
    falling = [start + (9 - i) * step for i in range(5)]
    growing = [low * ratio**i for i in range(5)]
    mean, spread = rng.randrange(12, 60), rng.sample(range(1, 10), 2)
    sample = [mean - spread[0], mean + spread[0], mean - spread[1], mean + spread[1]]
    rng.shuffle(sample)
    return {"rising": ", ".join(map(str, rising)), "falling": ", ".join(map(str, falling)),
            "growing": ", ".join(map(str, growing)), "sample": ", ".join(map(str, sample)),
            "kind": rng.choice(SAMPLES), "start": str(start), "step": str(step),
            "weeks": str(rng.randrange(3, 12)), **_two_names(rng)}


def _ages(rng):
    young, gap, times = rng.randrange(4, 20), rng.randrange(2, 15), rng.randrange(2, 5)
    return {"young": str(young), "old": str(young + gap), "gap": str(gap), "times": str(times),
            "sum": str(2 * young + gap), "multiple": str(young * times), "years": str(rng.randrange(2, 20)),
            "goods": rng.choice(GOODS), **_two_names(rng)}


# --------------------------------------------------------------------------------------------------- families
ARITHMETIC = Family("arithmetic", "math", (
    "What is {big} + {small}? Reply in at most ten words.",
    "Calculate {big} minus {small}. Just give the number.",
    "{factor} times {small} = ? Begin with \"The answer is\".",
    "Divide {dividend} by {divisor} and check it with a multiplication, in one sentence.",
    "Add {big}, {small} and {third}. Show one line of working.",
    "{name} says that {big} + {third} is more than {big} + {small}. Is that right? Answer yes or no with a "
        "reason.",
    "Work out ({third} + {small}) x {divisor} and show one step in between. One short sentence.",
    "Is {big} even or odd? And what is double that number?",
    "Round {big} to the nearest ten, then add {small}.",
), _arithmetic)

SHOPPING = Family("shopping", "math", (
    "A {first} costs ${price} and a {second} costs ${price2}. How much do {count} {first}s and {count2} "
        "{second}s cost together? Answer in one sentence.",
    "{name} buys {count} {first}s at ${price} each. What is the total? Give one line of working.",
    "{name} pays with ${paid} for {count} {first}s (${price} each) and {count2} {second}s (${price2} each). "
        "How much change is due? Two short sentences.",
    "Each {first} is ${price}. {name} has ${paid}. What is the greatest number of {first}s {name} can buy? "
        "Explain in one sentence.",
    "How much more do {count} {first}s at ${price} cost than one {second} at ${price2}? Begin with \"The "
        "answer is\".",
    "{name} sold {count} {first}s for ${price} each and {name2} sold {count2} {second}s for ${price2} each. "
        "Who earned more? Explain in one sentence.",
    "bill: {count} x {first} @ ${price}, {count2} x {second} @ ${price2}. total? short answer pls",
    "{name} and {name2} share the cost of {count} {first}s at ${price} each equally. What does each pay? "
        "One sentence.",
), _shopping)

SHARING = Family("sharing", "math", (
    "{name} has {total} {goods} and puts them equally into {groups} {containers}. How many are in each? One "
        "sentence, please.",
    "There are {groups} {containers} with {each} {goods} in each. How many {goods} are there altogether?",
    "{total_rest} {goods} are shared equally among {groups} friends. How many does each friend get and how "
        "many are left over? One sentence.",
    "{name} fills {containers} with {each} {goods} each. How many {containers} are needed for {total} "
        "{goods}? Answer in at most ten words.",
    "{name} gives {rest} of {total} {goods} to {name2}. How many are left? One short sentence.",
    "All {groups} {containers} are full, with {each} {goods} in each. Give the total in one short sentence.",
    "{name} had {each} {goods}, found {groups} more, and then gave {rest} to {name2}. How many now? Answer "
        "in at most ten words.",
    "If {groups} {containers} hold {total} {goods}, how many {goods} do two of them hold? Explain in one "
        "sentence.",
), _sharing)

TRAVEL = Family("travel", "math", (
    "A {vehicle} travels at {speed} km/h for {hours} hours. How far does it go? Answer in one sentence.",
    "The road from {city} to {city2} is {distance} km. How long does a {vehicle} need at {speed} km/h? "
        "Explain in one sentence.",
    "{name} went {distance} km in {hours} hours. What was the average speed? Reply in one short sentence.",
    "A {vehicle} has done {extra} km of a {distance} km trip to {city}. How many km remain? Give the number "
        "and its unit, nothing else.",
    "One {vehicle} goes {speed} km/h, another {faster} km/h. How many km apart are they after {hours} hours "
        "in the same direction? One short sentence.",
    "{name} drives from {city} to {city2}: {distance} km at {speed} km/h, with a break of {extra} minutes. "
        "How long is the trip? Answer in at most 20 words.",
    "Is it possible to go {distance} km in {hours} hours at {faster} km/h? Answer yes or no and say why in "
        "one sentence.",
), _travel)

PERCENT = Family("percent", "math", (
    "What is {percent}% of {price}? Answer in one short sentence.",
    "A {item} costs ${price}. It is {percent}% off. What is the new price? Explain in one sentence.",
    "{percent}% of the {people} people in a club play chess. How many is that? One short sentence.",
    "{name} left a {percent}% tip on a ${price} bill. How much was the tip? Reply in at most ten words.",
    "The price of a {item} rises by {percent}% from ${price}. By how many dollars does it rise? One "
        "sentence.",
    "Write {percent}% as a fraction in lowest terms and say in one sentence how many of {people} people "
        "that is.",
    "{name} has saved {percent}% of ${price} for a {item}. How much is still missing? short answer please",
    "{name} sold {percent}% of {people} {goods}. How many {goods} remain? Answer in the form \"Remaining: "
        "N\".",
), _percent)

SHAPES = Family("shapes", "math", (
    "A {room} is {length} m long and {width} m wide. What is its area? Answer in one sentence.",
    "Find the perimeter of a rectangle with sides {length} cm and {width} cm. Reply in one short sentence.",
    "What is the area of a square with side {side} cm? Give the number and its unit.",
    "A rectangular {room} has an area of {area} square meters and a width of {width} meters. How long is "
        "it? One short sentence.",
    "{name} wants a fence around a {length} m by {width} m {room}. The fence costs ${cost} per meter. What "
        "does it cost? Explain in one or two sentences.",
    "A box is {width} cm by {side} cm by {height} cm. Give its volume with the unit, in one sentence.",
    "Which has the larger area: a {side} by {side} square or a {length} by {width} rectangle? Answer in one "
        "sentence.",
    "The perimeter of a rectangle is {perimeter} m and one side is {length} m. Find the other side and "
        "answer in at most ten words.",
), _shapes)

CLOCK = Family("clock", "math", (
    "A {event} starts at {start} and lasts {duration} minutes. When does it end?",
    "The {event} began at {start} and ended at {end}. How many minutes did it last?",
    "Convert {duration} minutes to hours and minutes.",
    "{name} works {hours} hours a day for {days} days. How many hours is that in total?",
    "A {event} takes {long} and has to end at {end}. When must {name} start? Answer with a time only.",
    "How many days are {days} weeks? And how many hours are {hours} days? Two short lines.",
    "{name}'s {event} lasts {duration} minutes, then there is a break of {break_} minutes. How long is that "
        "together, in minutes?",
    "{name} arrives at {start}. {name2} arrives {break_} minutes later. At what time does {name2} arrive?",
), _clock)

SERIES = Family("series", "math", (
    "What is the next number: {rising}, ...? Explain in one sentence.",
    "Continue the sequence with two more numbers and stop there: {falling}",
    "Find the rule of this pattern in one sentence: {growing}",
    "Find the mean of these {kind}, in one short sentence: {sample}",
    "Which of these {kind} is the largest? {sample}. One short sentence.",
    "What is the difference between the largest and the smallest of {sample}? Just the number.",
    "{name} saves ${start} in week 1 and ${step} more in each following week. How much does {name} save in "
        "week {weeks}? One sentence.",
    "Add up the numbers {rising} and write the sum in one sentence.",
), _series)

AGES = Family("ages", "math", (
    "{name} is {young} years old and {name2} is {gap} years older. How old is {name2}? Answer in one "
        "sentence.",
    "{name} is {young}. {name2} is {times} times as old. How old is {name2}, and what is the difference? "
        "Two short sentences.",
    "{name} is {old} and {name2} is {young}. How old will each of them be in {years} years? One sentence "
        "for both.",
    "The ages of {name} and {name2} add up to {sum}. {name} is {young}. How old is {name2}? Begin with "
        "\"The answer is\".",
    "{name} has {young} {goods} and {name2} has {times} times as many. How many do they have together? "
        "Reply in one short sentence.",
    "{name2} has {multiple} {goods}, {times} times as many as {name}. How many does {name} have? Explain "
        "briefly.",
    "{name} read {young} pages a day for {years} days. Write the number of pages in one sentence.",
), _ages)

FAMILIES = (ARITHMETIC, SHOPPING, SHARING, TRAVEL, PERCENT, SHAPES, CLOCK, SERIES, AGES)
