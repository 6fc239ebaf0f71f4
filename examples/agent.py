"""An agent with tools: the model asks for calls, the program makes them, until it has an answer.

Any client of OpenAI's API will do; this one is OpenAI's own (`pip install openai`). The embedded
model knows no tools, so the first call is forced; a model that does decides by itself ("auto").

    quire serve --port 8000
    python examples/agent.py http://127.0.0.1:8000
"""

import json
import sys

import openai
from openai.types.chat import ChatCompletionMessageParam

MAX_TURNS = 4

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "count_letters",
            "description": "How often a letter is in a word.",
            "parameters": {
                "type": "object",
                "properties": {
                    "word": {"enum": ["strawberry", "banana"]},
                    "letter": {"type": "string", "pattern": "^[a-z]$"},
                },
                "required": ["word", "letter"],
                "additionalProperties": False,
            },
        },
    }
]


def count_letters(word: str, letter: str) -> int:
    """The tool."""
    return word.count(letter)


def main() -> None:
    """Run the loop for one question."""
    url = (sys.argv[1:] or ["http://127.0.0.1:8000"])[0]
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    question = "How many letters r are in strawberry?"
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": question}]
    for turn in range(MAX_TURNS):
        answer = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=TOOLS,  # type: ignore[arg-type]  # plain objects, as in OpenAI's documents
            tool_choice="required" if turn == 0 else "none",
            parallel_tool_calls=False,
            max_tokens=64,
            seed=1,
        )
        message = answer.choices[0].message
        if not message.tool_calls:
            print(message.content)
            break
        messages.append(message.model_dump(exclude_none=True))  # type: ignore[arg-type]
        for call in message.tool_calls:
            assert call.type == "function"
            arguments = json.loads(call.function.arguments)
            result = count_letters(**arguments)
            print(f"{call.function.name}({arguments}) = {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


if __name__ == "__main__":
    main()
