"""A batch file: many calls in OpenAI's format, answered into another file by `quire batch`.

Run it again after a crash and only the calls without an answer are made.

    python examples/batch_file.py [FOLDER]
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

FUNCTIONS = ("os.path.join", "json.dumps", "sorted", "len")


def call(name: str) -> dict[str, object]:
    """One line of the file."""
    body = {
        "messages": [{"role": "user", "content": f"What does {name} do?"}],
        "max_tokens": 32,
        "seed": 1,
    }
    url = "/v1/chat/completions"
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def main() -> None:
    """Write the calls, answer them, print what came."""
    folder = Path((sys.argv[1:] or [tempfile.mkdtemp()])[0])
    calls, answers = folder / "calls.jsonl", folder / "answers.jsonl"
    calls.write_text("".join(json.dumps(call(name)) + "\n" for name in FUNCTIONS))
    quire = [sys.executable, "-m", "quire"]
    subprocess.run([*quire, "batch", calls, "-o", answers, "--max-num-seqs", "4"], check=True)
    for line in answers.read_text().splitlines():
        answer = json.loads(line)
        content = answer["response"]["body"]["choices"][0]["message"]["content"]
        print(f"{answer['custom_id']}: {content.splitlines()[0]}")


if __name__ == "__main__":
    main()
