"""Code: small Python functions, snippets to explain, fix and test, SQL, shell, JSON and regexes."""

import random

from scripts.families import Family
from scripts.families.words import NAMES, commas, lines, slots

# ------------------------------------------------------------------------------------------------------ lists
# name | parameters | what it returns
TASKS = tuple(tuple(part.strip() for part in line.split("|")) for line in lines("""
    add_all | numbers | the sum of a list of numbers
    count_vowels | text | the number of vowels in a string
    is_even | n | True if a number is even
    reverse_text | text | a string reversed
    largest | numbers | the largest number in a list
    smallest | numbers | the smallest number in a list
    factorial | n | the factorial of n
    average | numbers | the mean of a list of numbers
    is_palindrome | word | True if a word reads the same backwards
    square_all | numbers | a list with each number squared
    count_words | text | the number of words in a sentence
    first_letters | words | a list of the first letter of each word
    remove_duplicates | items | the list without repeated items
    to_celsius | fahrenheit | a temperature converted to Celsius
    to_miles | kilometers | a distance converted to miles
    longest_word | words | the longest word in a list
    only_even | numbers | the even numbers of a list
    multiply | a, b | the product of two numbers
    full_name | first, last | the two names joined by a space
    area_of_circle | radius | the area of a circle
    is_leap_year | year | True if the year is a leap year
    last_item | items | the last item of a list
    count_item | items, target | how often an item occurs in a list
    capitalize_words | text | a string with every word capitalized
    is_prime | n | True if a number is prime
    fibonacci | n | the first n Fibonacci numbers
    merge_lists | first, second | two lists joined into one
    middle | items | the middle item of a list
    without_spaces | text | a string with all spaces removed
    absolute | n | the absolute value of a number
    contains | items, target | True if an item is in a list
    sort_by_length | words | the words sorted by length
    digits_sum | n | the sum of the digits of a number
    clamp | value, low, high | a value limited to a range
    initials | name | the initials of a full name
    hours_to_minutes | hours | a number of hours converted to minutes
    gcd | a, b | the greatest common divisor of two numbers
    flatten | lists | one flat list made from a list of lists
    swap_case | text | a string with upper and lower case swapped
    every_second | items | every second item of a list
"""))
EXTRAS = lines("""
    Return None for empty input.
    Use a for loop.
    Use a list comprehension where it fits.
    Do not import anything.
    Add type hints.
    Use a clear variable name for the result.
    Raise ValueError for bad input.
    Keep it under six lines.
    Call the result `result`.
    Do not use a built-in that does the whole job.
""")
NAMES_OF_LISTS = commas("numbers, prices, scores, values, ages, points, sizes, totals, weights, counts")
# table: its number column, then its other columns
TABLES = {
    "customers": ("age", "name", "city", "email"),
    "orders": ("total", "customer_id", "status", "created_at"),
    "products": ("price", "title", "stock", "category"),
    "employees": ("salary", "name", "department", "hired_on"),
    "books": ("pages", "title", "author", "year"),
    "students": ("grade", "name", "school", "age"),
    "flights": ("price", "origin", "destination", "departs_at"),
    "songs": ("seconds", "title", "artist", "year"),
    "rooms": ("price", "number", "floor", "beds"),
    "tickets": ("priority", "subject", "owner", "opened_at"),
}
FILES = commas("""
notes.txt, access.log, data.csv, report.md, server.log, users.json, config.yaml, todo.txt, errors.log,
words.txt, sales.csv, main.py, backup.tar.gz, index.html
""")
FOLDERS = commas("src, docs, logs, photos, build, backup, data, tests, downloads, tmp, reports, public")
PATTERNS = tuple(rf"{prefix}{body}" for prefix in ("", "^", r"\b", "id:") for body in (
    r"\d{5}", r"\d{4}-\d{2}-\d{2}", r"[A-Z][a-z]+", r"\w+ing\b", r"#[0-9a-f]{6}", r"\$\d+", r"\s{2,}",
    r"[aeiou]",
    r"\w+@\w+\.com", r"(yes|no)", r"-?\d+", r".*\.txt",
))
EXTENSIONS = commas(".txt, .log, .csv, .py, .md, .json, .jpg, .tmp")


# -------------------------------------------------------------------------------------------- little programs
def _list_literal(rng: random.Random) -> str:
    return str([rng.randrange(1, 30) for _ in range(rng.randrange(3, 6))])


def _snippet(rng: random.Random) -> dict[str, str]:
    """A correct snippet of two to six lines that prints something."""
    name, other = rng.sample(NAMES_OF_LISTS, 2)
    literal, limit, word = _list_literal(rng), rng.randrange(3, 20), rng.choice(NAMES)
    body = rng.choice((
        f"{name} = {literal}\ntotal = 0\nfor n in {name}:\n    total += n\nprint(total)",
        f"{name} = {literal}\n{other} = [n for n in {name} if n > {limit}]\nprint({other})",
        f"{name} = {literal}\nprint(max({name}) - min({name}))",
        f"text = \"{word}\"\nprint(text[::-1].lower())",
        f"for i in range({limit % 4 + 2}):\n    print(i * {limit})",
        f"{name} = {literal}\n{name}.sort()\nprint({name}[0], {name}[-1])",
        f"def check(n):\n    return n % {limit % 5 + 2} == 0\n\nprint(check({limit * 3}))",
        f"x = {limit}\nwhile x > {limit // 2}:\n    x -= 1\nprint(x)",
        f"{name} = {{\"{word}\": {limit}}}\n{name}[\"total\"] = sum({name}.values())\nprint({name})",
        f"{name} = {literal}\nprint(len({name}) * {limit})",
        f"{name} = {literal}\nif sum({name}) > {limit * 3}:\n    print(\"big\")\nelse:\n    print(\"small\")",
        f"word = \"{word}\"\ncount = 0\nfor letter in word:\n    if letter in \"aeiou\":\n"
        "        count += 1\nprint(count)",
    ))
    return {"snippet": body, "variable": name, "word": word, "limit": str(limit)}


def _bug(rng: random.Random) -> dict[str, str]:
    """A snippet with one mistake, and what a user would say about it."""
    name, word, limit = rng.choice(NAMES_OF_LISTS), rng.choice(NAMES), rng.randrange(3, 40)
    broken, symptom = rng.choice((
        (f"def total({name})\n    return sum({name})", "SyntaxError: expected ':'"),
        (f"{name} = {_list_literal(rng)}\nprint({name}[len({name})])", "IndexError: list index out of range"),
        (f"age = {limit}\nprint(\"Age: \" + age)", "TypeError: can only concatenate str"),
        (f"def greet(name):\n    print(\"Hello, \" + nam)\n\ngreet(\"{word}\")",
         "NameError: name 'nam' is not defined"),
        (f"{name} = {_list_literal(rng)}\nif {name} = []:\n    print(\"empty\")",
         "SyntaxError: invalid syntax"),
        (f"def mean({name}):\n    return sum({name}) / 0", "ZeroDivisionError: division by zero"),
        (f"for i in range({limit}):\nprint(i)", "IndentationError: expected an indented block"),
        (f"user = {{\"name\": \"{word}\"}}\nprint(user[\"age\"])", "KeyError: 'age'"),
        (f"def is_adult(age):\n    return age < {limit}", f"it returns False for {limit + 5}"),
        (f"count = {limit}\nwhile count > 0:\n    print(count)", "the loop never stops"),
        (f"value = int(\"{word}\")", "ValueError: invalid literal for int()"),
        (f"def add(a, b):\n    a + b\n\nprint(add({limit}, 2))", "it prints None"),
        (f"{name} = ({limit}, 2)\n{name}.append(3)",
         "AttributeError: 'tuple' object has no attribute 'append'"),
    ))
    return {"broken": broken, "symptom": symptom, "name": rng.choice(NAMES)}


def _function(rng: random.Random) -> dict[str, str]:
    name, parameters, returns = rng.choice(TASKS)
    return {"fname": name, "params": parameters, "returns": returns, "extra": rng.choice(EXTRAS),
            "sample": _list_literal(rng)}


def _written(rng: random.Random) -> dict[str, str]:
    """A whole small function, for docstrings, tests and reviews."""
    word, limit, rate = rng.choice(NAMES_OF_LISTS), rng.randrange(2, 60), rng.randrange(2, 30)
    name, body = rng.choice((
        ("total_price", f"def total_price({word}):\n    return sum({word}) + {limit}"),
        ("discount", f"def discount(price):\n    return price - price * {rate} / 100"),
        ("is_long", f"def is_long(text):\n    return len(text) > {limit}"),
        ("above", f"def above({word}):\n    return [x for x in {word} if x > {limit}]"),
        ("shorten", f"def shorten(text):\n    return text[:{limit}] + \"...\""),
        ("scale", f"def scale({word}):\n    return [x * {rate} for x in {word}]"),
        ("is_valid_age", f"def is_valid_age(age):\n    return 0 < age < {limit + 60}"),
        ("add_tax", f"def add_tax(amount, rate={rate}):\n    return amount * (1 + rate / 100)"),
        ("count_big", f"def count_big({word}):\n    return len([x for x in {word} if x >= {limit}])"),
        ("repeat", f"def repeat(text, times={limit % 7 + 2}):\n    return text * times"),
        ("split_line", f"def split_line(line):\n    return line.strip().split(\",\")[:{limit % 8 + 2}]"),
    ))
    return {"fname": name, "function": body, "value": str(rng.randrange(1, 99))}


def _sql(rng: random.Random) -> dict[str, str]:
    table = rng.choice(tuple(TABLES))
    numeric, *others = TABLES[table]
    first, second = rng.sample(others, 2)
    return {"table": table, "columns": ", ".join((*others, numeric)), "first": first, "second": second,
            "numeric": numeric, "limit": str(rng.randrange(2, 120)), "top": str(rng.randrange(3, 21)),
            "value": rng.choice(NAMES)}


def _json(rng: random.Random) -> dict[str, str]:
    name, age = rng.choice(NAMES), rng.randrange(18, 80)
    first, second = rng.sample(("name", "age", "city", "active", "score", "email"), 2)
    return {"name": name, "age": str(age), "first": first, "second": second, "pattern": rng.choice(PATTERNS),
            "title": rng.choice(tuple(TABLES)), "count": str(rng.randrange(1, 90)),
            "object": f'{{"name": "{name}", "age": {age}, "tags": ["{first}", "{second}"]}}',
            "broken": f'{{"name": "{name}", age: {age}, "{first}": true,}}'}


# --------------------------------------------------------------------------------------------------- families
FUNCTION = Family("function", "code", (
    "Write a Python function `{fname}({params})` that returns {returns}. {extra} Only the code.",
    "python: function {fname}, takes {params}, returns {returns}. no explanation. {extra}",
    "Complete this function:\n\ndef {fname}({params}):\n    \"\"\"Return {returns}.\"\"\"\n\n{extra} No "
        "comments, please.",
    "I need a one-line Python lambda called {fname} that returns {returns}. {extra}",
    "Describe in two sentences how you would write a function that returns {returns}. {extra} No code.",
    "Write `{fname}` in JavaScript. It should return {returns}. {extra} Just the function, no text around "
        "it.",
    "What does `{fname}({params})` probably return, and which type is that? A comment says: \"{extra}\" One "
        "sentence.",
), _function)

EXPLAIN = Family("explain_code", "code", (
    "What does this code print?\n\n```python\n{snippet}\n```",
    "Explain this Python code in one sentence:\n\n{snippet}",
    "{snippet}\n\n# In plain words, what happens here? Two sentences at most.",
    "A beginner asks what the last line of this code does. Answer briefly.\n\n```python\n{snippet}\n```",
    "Suggest one small improvement to this snippet, in one sentence:\n\n{snippet}",
    "Give a good title of at most six words for this program:\n\n```\n{snippet}\n```",
    "Which Python version or library does this need? Answer in one sentence.\n\n{snippet}",
), _snippet)

FIX = Family("fix_bug", "code", (
    "Fix this Python code. Show only the corrected code.\n\n```python\n{broken}\n```",
    "I get `{symptom}`. What is wrong in one sentence?\n\n{broken}",
    "{broken}\n\nProblem: {symptom}. Please give the fixed version and nothing else.",
    "Why does this fail ({symptom})? Explain to {name}, who is new to Python, in at most two "
        "sentences.\n\n{broken}",
    "Write a one-line commit message for the fix of this bug: {symptom}\n\n```python\n{broken}\n```",
    "Which line is wrong here? Quote it and say why in a few words.\n\n{broken}\n\nError seen by {name}: "
        "{symptom}",
    "help!! \"{symptom}\"\n{broken}\nhow do I fix it? one sentence pls",
), _bug)

REVIEW = Family("docs_and_tests", "code", (
    "Write a one-line docstring for this function:\n\n```python\n{function}\n```",
    "Write one assert statement that tests `{fname}`:\n\n{function}",
    "Add type hints to this function and show only the new code.\n\n```python\n{function}\n```",
    "{function}\n\nSuggest a better name for this function. Answer in at most five words.",
    "What does `{fname}` return for an empty or zero argument? One sentence.\n\n{function}",
    "Write a short comment to put above this function:\n\n{function}",
    "Rewrite this function without a return on the same line as the calculation: use a variable `result`. "
        "Code only.\n\n{function}",
    "What kind of value does `{fname}` return: text, number, list or truth value? Answer in one short "
        "sentence, for the argument {value}.\n\n{function}",
), _written)

SQL = Family("sql", "code", (
    "Write an SQL query that selects all rows of `{table}` where {numeric} is greater than {limit}. Query "
        "only.",
    "Table {table}({columns}). How many rows have {numeric} = {limit}? Give one SQL statement.",
    "SQL: the {first} and {second} of the {top} rows in {table} with the highest {numeric}. No explanation.",
    "Explain this query in one sentence: SELECT {first}, {second} FROM {table} WHERE {numeric} > {limit};",
    "Write an UPDATE statement that sets {numeric} to {limit} in {table} where {first} is '{value}'. Only "
        "the SQL.",
    "Delete every row from {table} with {numeric} below {limit}. One SQL line, please.",
    "What is wrong with this SQL? Answer in one sentence.\n\nSELEC {first} FROM {table} WHERE {numeric} > "
        "{limit};",
    "Does \"SELECT AVG({numeric}) FROM {table} WHERE {first} = '{value}' LIMIT {top};\" need a GROUP BY? "
        "Answer in one sentence.",
), _sql)

SHELL = Family("shell", "code", (
    "Give me a shell command that counts the lines in {file}. Command only.",
    "Can I see the first {count} lines of {file} with `head`? Answer in one short sentence.",
    "Does `find {folder} -name \"*{ext}\"` also look in subfolders? Answer in one sentence.",
    "Explain in one sentence: grep -n \"{word}\" {folder}/{file}",
    "bash one-liner: copy {file} from {folder} to {folder2}",
    "What does `tail -n {count} {folder}/{file}` do? Answer in one short sentence.",
    "I want to rename {folder}/{file} so that its name starts with \"{word}_\". Which command do I use? One "
        "line only.",
    "Write the command that deletes all {ext} files in {folder} older than {count} days. Add no explanation.",
), slots(file=FILES, count=lambda rng: str(rng.randrange(2, 60)), ext=EXTENSIONS, folder=FOLDERS[:6],
         folder2=FOLDERS[6:],
         word=commas("error, todo, old, final, warning, draft, new, test, fixme, backup")))

FORMATS = Family("json_and_regex", "code", (
    "Write a JSON object for a user named {name}, age {age}, with \"{first}\" and \"{second}\" as tags. "
        "JSON only.",
    "Is this valid JSON? Answer yes or no, and say why in one sentence.\n\n{broken}",
    "Correct this JSON and output nothing else:\n{broken}",
    "What is the value of the key \"age\" here, and is it a number or a string? One sentence.\n\n{object}",
    "Explain this regular expression to {name} in one short sentence: {pattern}",
    "Convert to a YAML document, no comments:\n{object}",
    "Give one JSON object for a row of \"{title}\" with the keys \"id\" and \"{first}\". Let the id be "
        "{count}. JSON only.",
    "Which keys does this object have? List only the names.\n{object}",
), _json)

FAMILIES = (FUNCTION, EXPLAIN, FIX, REVIEW, SQL, SHELL, FORMATS)
