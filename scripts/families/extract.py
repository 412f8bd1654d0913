"""Extract: records and messages with facts in them, and requests for some of those facts in a given form."""

import random

from scripts.families import Family
from scripts.families.words import (
    CITIES,
    FOODS,
    HOBBIES,
    JOBS,
    NAMES,
    OBJECTS,
    SURNAMES,
    WEEKDAYS,
    capital,
    clock_time,
    commas,
    date,
    lines,
    number,
    slots,
)

# ------------------------------------------------------------------------------------------------------ lists
COMPANIES = commas("""
Northwind Books, Blue Kettle Cafe, Harbor Tools, Green Lane Nursery, Pixel Print, Sunrise Bakery, Oak & Iron,
Maple Travel, City Cycle, Lighthouse Media, Redwood Furniture, Bright Dental, Polar Foods, Silver Line Taxis,
Meadow Farm
""")
STREETS = commas("""
Oak Street, Mill Lane, Station Road, Park Avenue, River Road, Church Street, Hill Street, King Street, Garden
Lane, Market Square, Lake Drive, Forest Way
""")
TALKS = commas("""
concert, book reading, cooking class, chess tournament, science fair, film night, charity run, art exhibition,
workshop, open day, flea market, quiz night
""")
FAULTS = lines("""
    the screen stays black
    it makes a loud noise
    the app closes after a few seconds
    I was charged twice
    the password link does not work
    the left wheel is loose
    the parcel never arrived
    the printer shows error {code}
    the heating does not turn on
    the invoice has the wrong address
""")
DEVICES = commas("""
tablet, washing machine, laptop, phone, printer, heater, bicycle, television, router, dishwasher, camera
""")
UNITS = commas("""
cups of flour, eggs, spoons of sugar, carrots, tomatoes, cups of rice, onions, potatoes, cups of milk, apples
""")
SKILLS = commas("""
a driving license, basic Spanish, two years of experience, good computer skills, a friendly manner, first aid
training, experience with children, a love of animals, a food safety certificate, good writing skills
""")
RATINGS = commas("one star, two stars, three stars, four stars, five stars")

_INNER = slots(
    first=NAMES[:27], second=NAMES[27:], surname=SURNAMES[:15], surname2=SURNAMES[15:], city=CITIES[:15],
    city2=CITIES[15:], company=COMPANIES, street=STREETS, house=number(1, 140), event=TALKS, day=WEEKDAYS,
    day2=WEEKDAYS, date=date, date2=date, time=clock_time, time2=clock_time, price=number(4, 95),
    price2=number(100, 980, 5),
    count=number(2, 9), count2=number(10, 60), code=number(1000, 9999), phone=number(100, 999), job=JOBS,
    skill=SKILLS[:5],
    skill2=SKILLS[5:], thing=OBJECTS[:14], thing2=OBJECTS[14:], food=FOODS, hobby=HOBBIES, fault=FAULTS,
    device=DEVICES,
    unit=UNITS[:5], unit2=UNITS[5:], rating=RATINGS,
)

ORDER = lines("""
    Order #{code}: {count} {thing}s at ${price} each and one {thing2}, shipped to {first} {surname}, \
        {house} {street}, {city}, on {date}.
    Hello, this is {first} {surname}. On {date} I ordered {count} {thing}s and {a_thing2} (order \
        {code}). Please send them to {house} {street} in {city}. I paid ${price2} by card.
    Thank you for your order, {first}! Items: {count} x {thing}, 1 x {thing2}. Total: ${price2}. Order \
        number {code}. Expected delivery in {city}: {day}, {date}.
    {company} delivery note {code}. Customer: {first} {surname}. Contents: {count} {thing}s, {count2} \
        {thing2}s. Deliver before {time} to {house} {street}, {city}. Call {first} at 555-0{phone}.
    Invoice {code} from {company} to {first} {surname}, {city}: {count} {thing}s, ${price2} in total, to \
        be paid by {date}.
""")
CONTACT = lines("""
    Hi, I'm {first} {surname}, {job} from {city}. You can reach me at 555-0{phone} or at \
        {first}@example.com, best after {time}.
    Please add my new colleague {first} {surname} to the list. She is {a_job} at {company} in {city}, \
        her number is 555-0{phone}, and her birthday is {date}.
    {first} {surname}, {house} {street}, {city}. Phone 555-0{phone}. In an emergency call {second} \
        {surname2}, who works as {a_job}.
    My name is {second} {surname2}. I am {count2} years old, I live in {city2} with my friend {first}, I \
        work as {a_job}, and I like {hobby}.
    Business card: {first} {surname} | {job} | {company} | {house} {street}, {city} | 555-0{phone}
""")
EVENT = lines("""
    Join us for the {event} at {company} on {day}, {date}, at {time}. Tickets cost ${price}; children \
        get in free. Host: {first} {surname}.
    The {event} in {city} has been moved from {day} to {day2}, {date}, and will now start at {time} in \
        the hall on {street}. {first} {surname} will open it.
    Save the date: {event}, {date}, {house} {street}, {city}. Doors open at {time}, and there are \
        {count2} seats. Bring {food} to share. Questions? Ask {first}.
    {first} invited {count2} people to the {event} on {date}. It starts at {time} and costs ${price} a \
        person. {second} takes care of the {food}.
    Dear parents, the {event} is on {day} at {time} in {city}. Please bring ${price} and {a_thing}. \
        {second} {surname2} from {company} will be our guest.
""")
JOB_AD = lines("""
    {company} in {city} is looking for {a_job} from {date}. You need {skill} and {skill2}. We pay \
        ${price2} a week. Write to {first} {surname}.
    Wanted: {job}, {count2} hours a week, in {city}. Required: {skill}. {skill2_cap} is a plus. Pay: \
        ${price} an hour. Apply by {date} at {company}.
    Do you want to work as {a_job}? {company} offers {count} new positions in {city} and {city2}. \
        {skill_cap} and {skill2} are required. Interviews take place on {day} at {time}.
    Job offer: {job} (part time) at {company}, {house} {street}, {city}. Start: {date}. Salary: \
        ${price2} a week. Contact: {first}, 555-0{phone}.
""")
TICKET = lines("""
    Hello, my {device} from {company} has a problem: {fault}. I bought it on {date} for ${price2}. My \
        customer number is {code}. {first} {surname}, {city}
    Ticket {code}, opened on {date} by {first} {surname}: {fault} ({device}). Priority: high. Assigned \
        to {second} at the {city} office.
    I am really annoyed. Since {day}, {fault}. I called {count} times and spoke to {second}, but nothing \
        happened. My {device} cost ${price2}. {first} {surname}
    Review of the {device} by {first} from {city}: {rating}. It was delivered on {date} and worked for \
        {count} weeks, but now {fault}. {company} answered after {count} days.
    {second} wrote at {time}: the {device} in room {code} needs repair, because {fault}. {first} will \
        look at it on {day}.
""")
TRIP = lines("""
    Your flight from {city} to {city2} leaves on {date} at {time} from gate {count}. Booking code \
        {code}, passenger {first} {surname}, seat {count2}A.
    {first} and {second} travel from {city} to {city2} on {day}. The train leaves at {time} from \
        platform {count}, and the tickets cost ${price} each.
    Hotel booking {code}: {first} {surname}, {count} nights in {city2} from {date}, room for two, \
        ${price2} in total, breakfast until {time}.
    Plan for {city2}: arrive on {date} at {time}, visit {company}, meet {second} for {food}, stay \
        {count} nights at {house} {street}, then fly back to {city}.
    The bus to {city2} is late. New departure: {time}, platform {count}. It should arrive at {time2}. \
        Passengers from {city} with ticket {code} get ${price} back.
""")
RECIPE = lines("""
    For {food} you need {count} {unit}, {count2} grams of butter and two {unit2}. It takes {count2} \
        minutes and serves {count}. The recipe is from {first}.
    Shopping list from {first}: {count} {unit}, three {unit2}, one {thing} for {second}, and bread from \
        {company}. Spend no more than ${price}.
    {first}'s {food}: mix {count} {unit} with two {unit2}, wait {count2} minutes, then bake for half an \
        hour at 180 degrees. Enough for {count} people.
    Stock on {date}: {count2} {thing}s, {count} {thing2}s, no {unit}. {second} will order more at \
        {company} on {day} for ${price2}.
    In the fridge there are {count} {unit2} and some {food}. We are out of {unit}. {first} goes shopping \
        on {day} at {time} with ${price}.
""")


# ------------------------------------------------------------------------------------------------------ texts
def text(source, rng: random.Random) -> str:
    """One record, all of its facts drawn together."""
    words = dict(_INNER(rng))
    words["fault"] = words["fault"].format(code=words["code"])
    words.update(skill_cap=capital(words["skill"]), skill2_cap=capital(words["skill2"]))
    return rng.choice(source).format(**words)


def _of(source, **more):
    """A fill with the slot `text` and further slots."""
    return slots(text=lambda rng: text(source, rng), **more)


# --------------------------------------------------------------------------------------------------- families
ORDERS = Family("orders", "extract", (
    "What is the order or invoice number in this text? Only the number.\n\n{text}",
    "What are the customer's name and city? Answer as \"NAME, CITY\".\n\n{text}",
    "{text}\n\nList the ordered items, one per line, with quantities.",
    "Who is the customer, and what was ordered? One sentence.\n\n{text}",
    "Find all numbers in this text and say what each stands for. One short line per number.\n\n{text}",
    "Fill in the form from the text.\nCustomer:\nItem:\nCity:\n\nText: {text}",
    "Does this text mention a price? If so, give it, if not, answer \"no price\".\n{text}",
    "Read the order and answer with one word: which city does it go to?\n\n{text}",
), _of(ORDER))

CONTACTS = Family("contacts", "extract", (
    "Extract the phone number from this text, or write \"none\".\n\n{text}",
    "What is the person's full name and job? Answer in the form \"Name - Job\".\n\n{text}",
    "{text}\n\nMake a JSON object with \"name\", \"job\" and \"city\" from this. JSON only.",
    "List all names of people in the text, separated by commas.\n\n{text}",
    "Where does this person live or work? One short sentence.\n\n{text}",
    "Turn this into an address book entry with three lines: name, city, phone.\n\n{text}",
    "I need a badge for this person: first name and profession only.\n\n{text}",
), _of(CONTACT))

EVENTS = Family("events", "extract", (
    "When does the event take place? Give date or day and time only.\n\n{text}",
    "{text}\n\nWhat happens, when and where? One sentence.",
    "Write the event on one line in the form \"DATE - TIME - EVENT\":\n\n{text}",
    "Which person is mentioned in this announcement, and in what role? One sentence.\n\n{text}",
    "Make a calendar entry of one line from this: {text}",
    "What do visitors have to pay or bring? One short sentence.\n\n{text}",
    "Answer only with the kind of event and the place:\n{text}",
), _of(EVENT))

JOB_ADS = Family("job_ads", "extract", (
    "What job is offered, and by which company? One sentence.\n\n{text}",
    "List the requirements in this ad as bullet points. If there are none, write \"none\".\n\n{text}",
    "{text}\n\nHow much is the pay? Answer in one short sentence.",
    "Extract \"company\", \"job\" and \"city\" as JSON:\n\n{text}",
    "I'm {name} and live in {city}. How do I apply for this job? One short sentence.\n\n{text}",
    "Shorten the ad to job, place and pay, in one line.\n\n{text}",
    "Tell {name} in one sentence what the job is and where.\n\n{text}",
), _of(JOB_AD, name=NAMES, city=CITIES))

TICKETS = Family("support", "extract", (
    "What is the problem in this message? One short sentence.\n\n{text}",
    "Extract the product and the fault as JSON with keys \"product\" and \"fault\".\n\n{text}",
    "{text}\n\nWho wrote or reported this? Only the name.",
    "Classify this message as \"delivery\", \"payment\", \"technical\" or \"other\". One word.\n\n{text}",
    "Is the writer angry, neutral or happy? Answer with one word and quote the words that show it.\n\n{text}",
    "Pick out every date, day or time in the text. If there is none, write \"none\".\n\n{text}",
    "Give product, problem and name in one sentence.\n\n{text}",
    "Which employee deals with this, if any is named? Short answer.\n\n{text}",
), _of(TICKET))

TRIPS = Family("bookings", "extract", (
    "Where does the trip go? Only the city.\n\n{text}",
    "Extract date or day, time and destination as a JSON object:\n\n{text}",
    "{text}\n\nAt what time should the traveler be there? One short sentence.",
    "Write this as a reminder of at most 15 words:\n\n{text}",
    "List every place named in this text, one per line.\n\n{text}",
    "What does it cost? If no price is given, say so in one short sentence.\n\n{text}",
    "From which city to which city? Answer as \"A -> B\".\n\n{text}",
), _of(TRIP))

HOUSEHOLD = Family("recipes_and_lists", "extract", (
    "List the ingredients or items in this text, one per line.\n\n{text}",
    "Which amounts are given? Write them as \"item: amount\".\n\n{text}",
    "{text}\n\nWho is mentioned here? Names only.",
    "Name one food or thing from the text and its amount, in one short sentence.\n\n{text}",
    "What is missing or has to be bought? One sentence.\n\n{text}",
    "Is a time or a date given here? Quote it.\n\n{text}",
    "Turn this into a shopping list of at most four short lines:\n{text}",
), _of(RECIPE))

FAMILIES = (ORDERS, CONTACTS, EVENTS, JOB_ADS, TICKETS, TRIPS, HOUSEHOLD)
