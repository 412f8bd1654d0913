"""Word lists that several categories share, and the small helpers that fill slots from lists."""

import random
from collections.abc import Callable, Mapping, Sequence

Source = Sequence[str] | Callable[[random.Random], str]


def slots(**sources: Source) -> Callable[[random.Random], Mapping[str, str]]:
    """A `fill` that takes each slot from a list, or from a function of the generator.

    Each slot NAME also comes as a_NAME, with its indefinite article: {object} umbrella,
    {a_object} an umbrella.
    """

    def fill(rng: random.Random) -> Mapping[str, str]:
        words = {name: source(rng) if callable(source) else rng.choice(source) for name,
                 source in sources.items()}
        return words | {f"a_{name}": a(word) for name, word in words.items()}

    return fill


def number(low: int, high: int, step: int = 1) -> Callable[[random.Random], str]:
    """A source of whole numbers low, low + step, ... up to and including high."""
    return lambda rng: str(rng.randrange(low, high + 1, step))


def lines(text: str) -> tuple[str, ...]:
    """One entry a line; a backslash continues a long one; runs of spaces count as one; no blank entries."""
    return tuple(" ".join(line.split()) for line in text.splitlines() if line.strip())


def commas(text: str) -> tuple[str, ...]:
    """Entries separated by commas, over any number of lines."""
    return tuple(entry.strip() for entry in text.replace("\n", " ").split(",") if entry.strip())


def capital(text: str) -> str:
    """The text with its first letter in upper case, the rest as it is."""
    return text[:1].upper() + text[1:]


# ------------------------------------------------------------------------------------------ people and places
NAMES = commas("""
Maya, Tom, Aisha, Daniel, Priya, Lucas, Nora, Omar, Elena, Jack, Fatima, Ben, Sofia, Kenji, Grace, Ivan,
Leila, Sam, Hannah, Diego, Ruth, Victor, Amara, Peter, Zoe, Hassan, Clara, Noah, Mei, Oscar, Anna, Felix,
Rosa, Adam, Julia, Kofi, Emma, Luis, Ines, Marcus, Tara, Henry, Yuki, Paul, Bella, Simon, Lena, George, Nadia,
Martin, Alice, Ravi, Carla, Leo
""")
SURNAMES = commas("""
Patel, Novak, Okafor, Lindqvist, Moreno, Hughes, Tanaka, Brown, Rossi, Ahmed, Schmidt, Kowalski, Nguyen,
Walker, Silva, Dubois, Murphy, Haddad, Larsen, Kim, Fischer, Costa, Bennett, Ivanova, Osei, Clarke, Romero,
Singh, Andersson, Reid
""")
CITIES = commas("""
Lisbon, Chicago, Nairobi, Osaka, Toronto, Madrid, Cairo, Seattle, Prague, Mumbai, Dublin, Sydney, Oslo, Lima,
Athens, Boston, Vienna, Seoul, Denver, Warsaw, Bristol, Havana, Naples, Helsinki, Austin, Lyon, Porto, Quito,
Leeds, Geneva
""")
COUNTRIES = commas("""
France, Japan, Kenya, Brazil, Canada, Egypt, Italy, Norway, India, Peru, Greece, Poland, Spain, Germany,
Australia, Mexico, Turkey, Sweden, Portugal, Ireland, Thailand, Chile, Morocco, Cuba, Finland, Austria,
Vietnam, Argentina, China, Hungary, Iceland, Jordan, Nepal, Denmark
""")
RELATIVES = commas("""
mother, father, sister, brother, grandmother, grandfather, aunt, uncle, cousin, neighbor, best friend,
roommate, boss, teacher, daughter, son, coworker, niece, nephew, husband, wife
""")
JOBS = commas("""
nurse, plumber, baker, bus driver, librarian, farmer, electrician, pilot, chef, dentist, gardener, carpenter,
teacher, firefighter, waiter, accountant, photographer, tailor, mechanic, journalist, lifeguard, architect,
translator, barber, software developer, receptionist, shop owner, truck driver, music teacher, vet
""")
AUDIENCES = commas("""
a five-year-old, a ten-year-old, a curious teenager, my grandmother, a beginner, a new employee, a tired
student, someone with no background in science, a busy manager, a tourist, a high school class
""")

# -------------------------------------------------------------------------------------------- things and time
ANIMALS = commas("""
cat, dog, owl, whale, zebra, penguin, rabbit, horse, turtle, bee, eagle, elephant, dolphin, frog, spider,
bear, goat, octopus, camel, parrot, wolf, hedgehog, otter, ant, lion, swan, squirrel, crab, snail, giraffe
""")
FOODS = commas("""
lentil soup, fried rice, apple pie, pancakes, vegetable curry, tomato pasta, omelettes, banana bread, chicken
salad, tacos, mushroom risotto, bean stew, garlic bread, fruit salad, fish cakes, baked potatoes, noodle soup,
oatmeal, roast carrots, cheese sandwiches, hummus, dumplings, pizza, chili, spinach omelettes
""")
HOBBIES = commas("""
gardening, chess, hiking, painting, baking, cycling, photography, knitting, swimming, reading, birdwatching,
pottery, running, fishing, playing guitar, board games, yoga, cooking, dancing, camping, woodworking,
astronomy, tennis, collecting stamps, learning languages, sailing, origami, writing poems
""")
OBJECTS = commas("""
umbrella, bicycle, lamp, suitcase, teapot, backpack, clock, mirror, ladder, notebook, pillow, candle, kettle,
guitar, blanket, camera, chair, bucket, globe, jacket, wallet, toaster, hammer, raincoat, telescope, keyboard,
mug, basket
""")
NATURE = commas("""
the ocean, rain, the moon, autumn leaves, snow, a river, the desert, sunrise, the wind, a forest, thunder,
spring, a mountain, the stars, fog, a garden, winter mornings, the beach, a waterfall, the night sky, clouds,
a meadow
""")
CONCEPTS = commas("""
gravity, inflation, photosynthesis, electricity, the water cycle, recycling, a vaccine, the internet, a
budget, democracy, evaporation, a black hole, a battery, an eclipse, compost, the food chain, sound,
magnetism, a volcano, an earthquake, DNA, a rainbow, interest on a loan, insurance, gluten, friction, a solar
panel, the seasons, tides, a computer virus, encryption, a search engine, supply and demand, a password
manager, Wi-Fi, a mortgage, taxes, oxygen, a comet, erosion, pollination, yeast, a satellite, GPS, a rocket
engine, the heart, the immune system, muscles, sleep, digestion, memory, vitamins, calories, blood pressure,
allergies, an algorithm, a database, cloud storage, a 3D printer, machine learning, voting, a constitution, a
strike, a census, recession, trade, a startup, copyright, a metaphor, irony, hibernation, migration,
camouflage, fossils, extinction, climate, a glacier, a desert, coral reefs, rust, boiling, a thermometer, a
compass, a lever, a pulley, static electricity, lightning, an echo, a mirage, soap, glass, concrete
""")
WEEKDAYS = commas("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday")
MONTHS = commas("""
January, February, March, April, May, June, July, August, September, October, November, December
""")


def clock_time(rng: random.Random) -> str:
    """A time of day on the quarter hour, such as 9:15 am."""
    hour = rng.randrange(7, 21)
    return f"{(hour - 1) % 12 + 1}:{rng.choice(('00', '15', '30', '45'))} {'am' if hour < 12 else 'pm'}"


def date(rng: random.Random) -> str:
    """A day of a month, such as March 14."""
    return f"{rng.choice(MONTHS)} {rng.randrange(1, 29)}"


def full_name(rng: random.Random) -> str:
    """First name and surname."""
    return f"{rng.choice(NAMES)} {rng.choice(SURNAMES)}"


def a(noun: str) -> str:
    """The noun with its indefinite article, by its first letter (no list here holds an hour or a unit)."""
    return f"{'an' if noun[:1].lower() in tuple('aeiou') else 'a'} {noun}"
