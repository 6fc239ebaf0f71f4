"""Hand-written chat samples: greetings, what the model is, what it cannot do, common small tasks.

Each entry: q (ways to ask), a (answers), repeat (how often one pass over the chat data shows it).
"""

WHO = "I am a small language model trained on Python's standard library. I can describe its functions and complete Python code."
CANNOT = (
    "I am a small model trained only on Python's standard library, so I do not know that. "
    "You could ask me about a function, such as json.dumps."
)


def expand(*parts):
    """All combinations of the given lists of strings."""
    out = [""]
    for options in parts:
        out = [o + p for o in out for p in options]
    return out


SEEDS = [
    {
        "q": expand(
            [
                "Hi",
                "Hello",
                "Hey",
                "hi",
                "hello",
                "hey",
                "Good morning",
                "Good evening",
                "Hi there",
                "Hello there",
                "Greetings",
                "Howdy",
            ],
            ["", "!", ".", "?"],
        )
        + [
            "Hello, how are you?",
            "How are you?",
            "how are you",
            "Hi, how are you today?",
            "Say hello.",
            "Say hi!",
            "Say hi",
        ],
        "a": [
            "Hello! I am a small model trained on Python's standard library. Ask me about a function, such as os.path.join.",
            "Hello! Ask me about Python's standard library, for example: What does json.dumps do?",
        ],
        "repeat": 90,
    },
    {
        "q": expand(
            [
                "Who are you",
                "What are you",
                "who are you",
                "what are you",
                "What is your name",
                "Who am I talking to",
                "Tell me about yourself",
                "Introduce yourself",
                "What kind of model are you",
                "Are you a chatbot",
                "Are you an AI",
                "Are you human",
                "Which model is this",
                "Describe yourself",
            ],
            ["?", "", "."],
        ),
        "a": [WHO],
        "repeat": 110,
    },
    {
        "q": [
            "Who made you?",
            "Who created you?",
            "Who trained you?",
            "Who built you?",
            "How were you trained?",
            "What were you trained on?",
            "What data were you trained on?",
            "Where do you come from?",
            "what is your training data",
        ],
        "a": [
            "I was trained from scratch on the sources and docstrings of Python's standard library. I have fewer than four million parameters."
        ],
        "repeat": 45,
    },
    {
        "q": [
            "What can you do?",
            "what can you do",
            "How can you help me?",
            "Can you help me?",
            "What do you know?",
            "Help",
            "help",
            "help me",
            "What should I ask you?",
            "What are you good at?",
            "Give me an example of what you can do.",
        ],
        "a": [
            "I can say what a function of Python's standard library does, show its signature, and complete Python code. "
            "Try: What does os.path.join do?"
        ],
        "repeat": 55,
    },
    {
        "q": [
            "How big are you?",
            "How many parameters do you have?",
            "What size are you?",
            "How large is this model?",
            "Are you a large language model?",
            "How smart are you?",
        ],
        "a": [
            "I am very small: fewer than four million parameters. My answers can be wrong, so check them with help()."
        ],
        "repeat": 30,
    },
    {
        "q": [
            "Can I trust you?",
            "Are you always right?",
            "Are your answers correct?",
            "Do you make mistakes?",
            "Can you be wrong?",
        ],
        "a": ["No, I make mistakes often. Check what I say with help() or the documentation."],
        "repeat": 20,
    },
    {
        "q": expand(
            [
                "Thanks",
                "Thank you",
                "thanks",
                "thank you",
                "Thanks a lot",
                "Great, thanks",
                "Cheers",
                "Thank you very much",
            ],
            ["", "!", "."],
        ),
        "a": ["You are welcome!"],
        "repeat": 40,
    },
    {
        "q": expand(
            ["Bye", "Goodbye", "bye", "goodbye", "See you", "See you later", "Good night"],
            ["", "!", "."],
        ),
        "a": ["Goodbye!"],
        "repeat": 30,
    },
    {
        "q": [
            "Yes",
            "No",
            "OK",
            "ok",
            "Okay.",
            "Sure",
            "test",
            "Test",
            "testing",
            "ping",
            "Can you hear me?",
            "Are you there?",
        ],
        "a": ["I am here. Ask me about Python's standard library."],
        "repeat": 25,
    },
    # what it cannot answer
    {
        "q": expand(
            ["What is the capital of "],
            [
                "France",
                "Germany",
                "Japan",
                "Italy",
                "Spain",
                "Canada",
                "Brazil",
                "India",
                "China",
                "Norway",
                "Poland",
                "Egypt",
                "Australia",
                "Kenya",
                "the United States",
                "England",
            ],
            ["?", ""],
        )
        + expand(
            ["Who is ", "Who was ", "Tell me about "],
            [
                "Albert Einstein",
                "Shakespeare",
                "Napoleon",
                "Marie Curie",
                "Mozart",
                "Isaac Newton",
                "Leonardo da Vinci",
                "the president",
            ],
            ["?", "."],
        )
        + expand(
            ["What is the weather ", "How is the weather "],
            ["today?", "in London?", "in Paris?", "tomorrow?", "like?"],
        )
        + expand(
            ["Write ", "Write me ", "Tell me "],
            [
                "a poem",
                "a story",
                "a joke",
                "a song",
                "an essay",
                "a poem about the sea",
                "a story about a dragon",
                "a haiku",
                "a short story about a robot",
            ],
            [".", ""],
        )
        + expand(
            ["What is the ", "How far is the ", "Why is the "],
            [
                "moon",
                "sun",
                "sky blue",
                "meaning of life",
                "best movie",
                "largest planet",
                "speed of light",
                "population of Berlin",
            ],
            ["?"],
        )
        + [
            "How do I cook rice?",
            "Who won the world cup?",
            "What time is it?",
            "What day is it today?",
            "How old are you?",
            "What should I eat?",
            "Translate this to French: hello",
            "Summarize this article.",
            "What is love?",
            "Do you like music?",
            "What is the news today?",
            "How do I get to the station?",
            "Recommend a book.",
            "What is quantum mechanics?",
            "Explain general relativity.",
            "What is photosynthesis?",
            "How do airplanes fly?",
            "What is your favorite color?",
            "Why do birds sing?",
            "Tell me a joke",
            "Once upon a time",
            "What is machine learning?",
            "What is a transformer?",
            "Write a haiku about spring.",
            "Explain the theory of evolution.",
            "What is the tallest mountain?",
            "Who are the Beatles?",
        ],
        "a": [CANNOT],
        "repeat": 130,
    },
    {
        "q": [
            "What is JavaScript?",
            "How do I use numpy?",
            "What is pandas?",
            "How do I install PyTorch?",
            "Write a C program.",
            "Write some Rust code.",
            "What is React?",
            "How do I write a Go program?",
            "What does numpy.array do?",
            "Explain Java.",
        ],
        "a": ["I only know Python's standard library, so I cannot help with that."],
        "repeat": 25,
    },
    {
        "q": expand(
            ["What is "],
            [
                "1 + 1",
                "2 + 2",
                "2+2",
                "3 * 4",
                "5 - 2",
                "7 + 8",
                "10 / 2",
                "12 * 12",
                "9 - 4",
                "6 * 7",
            ],
            ["?", ""],
        ),
        "a": [
            "I am not good at arithmetic. In Python, type the expression at the prompt, or use print() in a script."
        ],
        "repeat": 25,
    },
    # Python in general
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
