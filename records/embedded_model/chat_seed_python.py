"""Hand-written chat samples about Python; see chat_seed.py for what an entry says."""


def expand(*parts):
    """All combinations of the given lists of strings."""
    out = [""]
    for options in parts:
        out = [o + p for o in out for p in options]
    return out


PYTHON_SEEDS = [
    {
        "q": [
            "What is Python?",
            "what is python",
            "Tell me about Python.",
            "Explain Python.",
            "What is Python used for?",
        ],
        "a": [
            "Python is a general-purpose programming language with a large standard library. It is known for readable code."
        ],
        "repeat": 25,
    },
    {
        "q": [
            "What is the standard library?",
            "What is Python's standard library?",
            "Explain the standard library.",
        ],
        "a": [
            "The standard library is the set of modules that come with Python, such as os, json, re and math. You use them with import."
        ],
        "repeat": 15,
    },
    {
        "q": [
            "Write hello world in Python.",
            "Hello world in Python",
            "Print hello world.",
            "Write a hello world program.",
            "How do I print text?",
            "Show me hello world.",
            "Write a Python program that prints hello.",
        ],
        "a": ['```python\nprint("Hello, world!")\n```'],
        "repeat": 40,
    },
    {
        "q": [
            "Write a function that computes Fibonacci numbers.",
            "Write a fibonacci function.",
            "Fibonacci in Python",
            "Write a Python function for the Fibonacci sequence.",
            "Implement fibonacci.",
            "Write fib(n).",
        ],
        "a": [
            '```python\ndef fib(n):\n    """Return the n-th Fibonacci number."""\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n```'
        ],
        "repeat": 40,
    },
    {
        "q": [
            "Write a function that computes the factorial.",
            "Write a factorial function.",
            "Factorial in Python",
            "Implement factorial.",
        ],
        "a": [
            '```python\ndef factorial(n):\n    """Return n!."""\n    result = 1\n    for i in range(2, n + 1):\n        result *= i\n    return result\n```'
        ],
        "repeat": 25,
    },
    {
        "q": [
            "Write a function that checks whether a number is prime.",
            "Write is_prime.",
            "How do I test for a prime number?",
            "Implement is_prime(n).",
        ],
        "a": [
            '```python\ndef is_prime(n):\n    """Return True if n is a prime number."""\n    if n < 2:\n        return False\n    for i in range(2, int(n ** 0.5) + 1):\n        if n % i == 0:\n            return False\n    return True\n```'
        ],
        "repeat": 25,
    },
    {
        "q": [
            "How do I reverse a string?",
            "Reverse a string in Python.",
            "Write a function that reverses a string.",
        ],
        "a": ["Use a slice with a negative step:\n\n```python\ntext[::-1]\n```"],
        "repeat": 20,
    },
    {
        "q": ["How do I reverse a list?", "Reverse a list in Python."],
        "a": [
            "Use `items.reverse()` to reverse it in place, or `reversed(items)` for an iterator."
        ],
        "repeat": 15,
    },
    {
        "q": [
            "How do I read a file?",
            "How do I read a file in Python?",
            "Read a text file in Python.",
            "How can I open and read a file?",
        ],
        "a": ['```python\nwith open("file.txt", encoding="utf-8") as f:\n    text = f.read()\n```'],
        "repeat": 30,
    },
    {
        "q": [
            "How do I write to a file?",
            "How do I write a file in Python?",
            "Write text to a file.",
        ],
        "a": [
            '```python\nwith open("file.txt", "w", encoding="utf-8") as f:\n    f.write("Hello\\n")\n```'
        ],
        "repeat": 25,
    },
    {
        "q": [
            "How do I read a JSON file?",
            "How do I parse JSON?",
            "Load a JSON file in Python.",
            "How can I read JSON in Python?",
        ],
        "a": [
            'Use the json module:\n\n```python\nimport json\n\nwith open("data.json") as f:\n    data = json.load(f)\n```'
        ],
        "repeat": 30,
    },
    {
        "q": [
            "How do I write JSON?",
            "How do I save a dict as JSON?",
            "Write a dict to a JSON file.",
        ],
        "a": [
            'Use the json module:\n\n```python\nimport json\n\nwith open("data.json", "w") as f:\n    json.dump(data, f, indent=2)\n```'
        ],
        "repeat": 20,
    },
    {
        "q": [
            "How do I sort a list?",
            "Sort a list in Python.",
            "How can I sort a list?",
            "How do I sort a list in Python?",
        ],
        "a": [
            "Use `sorted(items)` for a new list, or `items.sort()` to sort in place. Both take `key` and `reverse`."
        ],
        "repeat": 25,
    },
    {
        "q": [
            "How do I list the files in a directory?",
            "List files in a folder.",
            "How can I list a directory?",
        ],
        "a": ['```python\nimport os\n\nfor name in os.listdir("."):\n    print(name)\n```'],
        "repeat": 20,
    },
    {
        "q": ["How do I join paths?", "How do I join two paths?", "How can I build a path?"],
        "a": ["Use `os.path.join(a, b)`, or `pathlib.Path(a) / b`."],
        "repeat": 20,
    },
    {
        "q": [
            "How do I get the current time?",
            "How do I get today's date?",
            "Current date in Python",
            "How do I get the date?",
        ],
        "a": [
            "Use the datetime module:\n\n```python\nimport datetime\n\nprint(datetime.datetime.now())\n```"
        ],
        "repeat": 20,
    },
    {
        "q": [
            "How do I run a command?",
            "How do I run a shell command?",
            "Run a program from Python.",
        ],
        "a": [
            'Use the subprocess module:\n\n```python\nimport subprocess\n\nsubprocess.run(["ls", "-l"], check=True)\n```'
        ],
        "repeat": 20,
    },
    {
        "q": [
            "How do I get a random number?",
            "Random number in Python",
            "How do I pick a random item?",
        ],
        "a": [
            "Use the random module: `random.randint(1, 6)` gives an integer and `random.choice(items)` picks an item."
        ],
        "repeat": 20,
    },
    {
        "q": [
            "How do I make a dict?",
            "What is a dictionary?",
            "What is a dict?",
            "Explain dictionaries.",
        ],
        "a": [
            'A dict maps keys to values:\n\n```python\nages = {"Ann": 31, "Bob": 27}\nprint(ages["Ann"])\n```'
        ],
        "repeat": 20,
    },
    {
        "q": ["What is a list?", "How do I make a list?", "Explain lists."],
        "a": [
            "A list is a mutable sequence of items:\n\n```python\nitems = [1, 2, 3]\nitems.append(4)\n```"
        ],
        "repeat": 20,
    },
    {
        "q": ["What is a tuple?", "Explain tuples."],
        "a": ["A tuple is an immutable sequence, written with parentheses: `point = (1, 2)`."],
        "repeat": 12,
    },
    {
        "q": ["What is a set?", "Explain sets."],
        "a": ["A set holds distinct items and tests membership quickly: `seen = {1, 2, 3}`."],
        "repeat": 12,
    },
    {
        "q": ["What is a generator?", "Explain generators.", "What does yield do?"],
        "a": [
            "A generator is a function with `yield`. It produces its values one by one, when they are asked for."
        ],
        "repeat": 15,
    },
    {
        "q": ["What is a list comprehension?", "Explain list comprehensions."],
        "a": [
            "It builds a list from an iterable in one expression: `squares = [x * x for x in range(10)]`."
        ],
        "repeat": 15,
    },
    {
        "q": ["What is a decorator?", "Explain decorators."],
        "a": [
            "A decorator is a function that takes a function and returns a changed one. It is written as `@name` above the definition."
        ],
        "repeat": 15,
    },
    {
        "q": ["What is a class?", "How do I write a class?", "Show me a class."],
        "a": [
            "```python\nclass Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n```"
        ],
        "repeat": 15,
    },
    {
        "q": [
            "How do I handle exceptions?",
            "What is try and except?",
            "How do I catch an exception?",
            "Explain exceptions.",
        ],
        "a": ["```python\ntry:\n    value = int(text)\nexcept ValueError:\n    value = 0\n```"],
        "repeat": 20,
    },
    {
        "q": [
            "How do I write a for loop?",
            "Show me a for loop.",
            "Count to ten in Python.",
            "Write a loop that prints numbers.",
        ],
        "a": ["```python\nfor i in range(1, 11):\n    print(i)\n```"],
        "repeat": 20,
    },
    {
        "q": [
            "How do I read command line arguments?",
            "How do I use argparse?",
            "Parse command line arguments.",
        ],
        "a": [
            'Use argparse:\n\n```python\nimport argparse\n\nparser = argparse.ArgumentParser()\nparser.add_argument("name")\nargs = parser.parse_args()\nprint(args.name)\n```'
        ],
        "repeat": 20,
    },
    {
        "q": [
            "How do I count words?",
            "Count the words in a text.",
            "How do I count items in a list?",
        ],
        "a": [
            "Use collections.Counter:\n\n```python\nfrom collections import Counter\n\ncounts = Counter(text.split())\n```"
        ],
        "repeat": 15,
    },
    {
        "q": [
            "How do I sum a list?",
            "Add up the numbers in a list.",
            "Write a function that adds two numbers.",
        ],
        "a": ["```python\ndef add(a, b):\n    return a + b\n\ntotal = sum([1, 2, 3])\n```"],
        "repeat": 15,
    },
    {
        "q": [
            "How do I use a regular expression?",
            "How do I search with a regex?",
            "Regex in Python",
        ],
        "a": [
            'Use the re module:\n\n```python\nimport re\n\nmatch = re.search(r"\\d+", text)\nif match:\n    print(match.group())\n```'
        ],
        "repeat": 18,
    },
    {
        "q": [
            "How do I make an HTTP request?",
            "Download a page in Python.",
            "How do I fetch a URL?",
        ],
        "a": [
            '```python\nfrom urllib.request import urlopen\n\nwith urlopen("https://www.python.org") as response:\n    body = response.read()\n```'
        ],
        "repeat": 18,
    },
    {
        "q": ["How do I start a thread?", "Run a function in a thread."],
        "a": [
            "```python\nimport threading\n\nthread = threading.Thread(target=work)\nthread.start()\nthread.join()\n```"
        ],
        "repeat": 12,
    },
    {
        "q": ["How do I measure time?", "Time a piece of code.", "How do I time a function?"],
        "a": [
            "```python\nimport time\n\nstart = time.perf_counter()\nwork()\nprint(time.perf_counter() - start)\n```"
        ],
        "repeat": 12,
    },
    {
        "q": ["How do I read a CSV file?", "Read CSV in Python."],
        "a": [
            '```python\nimport csv\n\nwith open("data.csv", newline="") as f:\n    for row in csv.reader(f):\n        print(row)\n```'
        ],
        "repeat": 15,
    },
    {
        "q": ["How do I compute a hash?", "SHA-256 in Python", "How do I hash a string?"],
        "a": ['```python\nimport hashlib\n\nprint(hashlib.sha256(b"text").hexdigest())\n```'],
        "repeat": 12,
    },
]
