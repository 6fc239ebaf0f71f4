"""Python libraries over many servers, in their defaults: LiteLLM, Haystack, Agno, llm.

    python -m benchmarks.clients.all_clients --only frameworks

installs them, starts a server and runs this; `cases` says what a case is.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from benchmarks.clients.cases import (
    FUNCTION,
    KEY,
    MESSAGES,
    PARAMETERS,
    PROMPT,
    TOOL,
    Reading,
    Unit,
    case,
    main,
)

NAMED = {"type": "function", "function": {"name": "report"}}
"""A tool choice that calls once, so that any model ends."""

# ---- LiteLLM ------------------------------------------------------------------------------------


def _litellm(provider: str, url: str, model: str) -> dict[str, Any]:
    """LiteLLM's arguments that name the server and the model."""
    base = f"{url}/v1" if provider in ("openai", "hosted_vllm") else url
    return {"model": f"{provider}/{model}", "api_base": base, "api_key": KEY}


def _litellm_chats(provider: str, url: str, model: str) -> None:
    """A whole answer, a stream, and a history with LiteLLM's own message in it."""
    import litellm

    common = _litellm(provider, url, model)
    whole = litellm.completion(**common, messages=MESSAGES, max_tokens=8, temperature=0)
    message = whole.choices[0].message
    assert message.content
    pieces = litellm.completion(
        **common,
        messages=MESSAGES,
        max_tokens=8,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    choices = [piece.choices[0] for piece in pieces if piece.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == message.content
    history = [*MESSAGES, message.model_dump(), *MESSAGES]
    assert litellm.completion(**common, messages=history, max_tokens=4).choices[0].message.content


def _litellm_calls(provider: str, url: str, model: str) -> None:
    """A forced call, whole and streamed, and its result in the next turn."""
    import litellm

    common = _litellm(provider, url, model)
    asked = {"messages": MESSAGES, "tools": [TOOL], "tool_choice": NAMED}
    message = litellm.completion(**common, **asked).choices[0].message
    (call,) = message.tool_calls
    Reading.model_validate_json(call.function.arguments)
    pieces = list(litellm.completion(**common, **asked, stream=True))
    built = litellm.stream_chunk_builder(pieces).choices[0].message
    Reading.model_validate_json(built.tool_calls[0].function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "name": "report", "content": "noted"}
    for first in (message, message.model_dump()):
        history = [*MESSAGES, first, result]
        second = litellm.completion(**common, messages=history, tools=[TOOL], max_tokens=8)
        assert second.choices[0].finish_reason


@case("litellm", "openai/: chats, streams, tools")
def litellm_openai(url: str, model: str) -> None:
    _litellm_chats("openai", url, model)
    _litellm_calls("openai", url, model)


@case("litellm", "hosted_vllm/: chats, streams, tools")
def litellm_vllm(url: str, model: str) -> None:
    _litellm_chats("hosted_vllm", url, model)
    _litellm_calls("hosted_vllm", url, model)


@case("litellm", "a call that max_tokens cut, in the history")
def litellm_cut(url: str, model: str) -> None:
    import litellm

    common = _litellm("openai", url, model)
    asked = {"messages": MESSAGES, "tools": [TOOL], "tool_choice": NAMED, "max_tokens": 3}
    message = litellm.completion(**common, **asked).choices[0].message
    assert not message.content and not message.tool_calls
    litellm.completion(**common, messages=[*MESSAGES, message, *MESSAGES], max_tokens=4)


@case("litellm", "hosted_vllm/: models, form, text, embedding, rerank")
def litellm_rest(url: str, model: str) -> None:
    import litellm

    common = _litellm("hosted_vllm", url, model)
    found = litellm.completion(**common, messages=MESSAGES, response_format=Reading)
    Reading.model_validate_json(found.choices[0].message.content)
    assert litellm.text_completion(**common, prompt="import", max_tokens=4).choices[0].text
    assert len(litellm.embedding(**common, input=["a", "b"]).data) == 2
    ranked = litellm.rerank(**common | {"api_base": url}, query="a", documents=["a", "b"])
    assert len(ranked.results) == 2
    listed = litellm.get_valid_models(
        check_provider_endpoint=True,
        custom_llm_provider="hosted_vllm",
        api_base=f"{url}/v1",
        api_key=KEY,
    )
    assert listed == [model]


@case("litellm", "anthropic/: chats, streams, tools")
def litellm_anthropic(url: str, model: str) -> None:
    _litellm_chats("anthropic", url, model)
    _litellm_calls("anthropic", url, model)


@case("litellm", "ollama_chat/ and ollama/: chats, streams, form")
def litellm_ollama(url: str, model: str) -> None:
    import litellm

    for provider in ("ollama_chat", "ollama"):
        _litellm_chats(provider, url, model)
        found = litellm.completion(
            **_litellm(provider, url, model), messages=MESSAGES, response_format=Reading
        )
        Reading.model_validate_json(found.choices[0].message.content)


# ---- Haystack -----------------------------------------------------------------------------------


def _haystack(url: str, model: str, responses: bool = False, **options: Any) -> Any:
    from haystack.components.generators import chat
    from haystack.utils import Secret

    kind = chat.OpenAIResponsesChatGenerator if responses else chat.OpenAIChatGenerator
    return kind(api_key=Secret.from_token(KEY), model=model, api_base_url=f"{url}/v1", **options)


def _haystack_tool() -> Any:
    from haystack.tools import Tool

    return Tool(**FUNCTION, function=lambda unit, degrees: "noted")


@case("haystack-ai", "OpenAIChatGenerator: whole, streamed, a form")
def haystack_chat(url: str, model: str) -> None:
    from haystack.dataclasses import ChatMessage

    asked = [ChatMessage.from_system("Be brief."), ChatMessage.from_user(PROMPT)]
    for responses in (False, True):
        assert _haystack(url, model, responses).run(asked)["replies"][0].text
    pieces: list[str] = []
    streaming = _haystack(url, model, streaming_callback=lambda piece: pieces.append(piece.content))
    assert streaming.run(asked)["replies"][0].text == "".join(pieces)
    form = _haystack(url, model, generation_kwargs={"response_format": Reading})
    Reading.model_validate_json(form.run(asked)["replies"][0].text)


@case("haystack-ai", "tools: a loop, streamed; Agent")
def haystack_tools(url: str, model: str) -> None:
    from haystack.components.agents import Agent
    from haystack.dataclasses import ChatMessage

    asked, tool = [ChatMessage.from_user(PROMPT)], _haystack_tool()
    forced = {"tool_choice": NAMED}
    for callback in (None, lambda piece: None):
        generator = _haystack(
            url, model, tools=[tool], generation_kwargs=forced, streaming_callback=callback
        )
        first = generator.run(asked)["replies"][0]
        (call,) = first.tool_calls
        Reading.model_validate(call.arguments)
        history = [*asked, first, ChatMessage.from_tool("noted", origin=call)]
        free = _haystack(url, model, tools=[tool], generation_kwargs={"max_tokens": 8})
        assert free.run(history)["replies"]
    talker = _haystack(url, model, generation_kwargs={"max_tokens": 30})
    agent = Agent(chat_generator=talker, tools=[tool], system_prompt="Be brief.", max_agent_steps=2)
    assert len(agent.run(messages=asked)["messages"]) > 1


@case("haystack-ai", "embedders")
def haystack_embedders(url: str, model: str) -> None:
    from haystack import Document
    from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
    from haystack.utils import Secret

    common = {"api_key": Secret.from_token(KEY), "model": model, "api_base_url": f"{url}/v1"}
    assert OpenAITextEmbedder(**common).run("a")["embedding"]
    documents = [Document(content="a"), Document(content="b")]
    embedder = OpenAIDocumentEmbedder(**common, progress_bar=False)
    assert all(each.embedding for each in embedder.run(documents)["documents"])


# ---- Agno ---------------------------------------------------------------------------------------


def _agno(kind: str, url: str, model: str, **options: Any) -> Any:
    """An agent over one of the kinds of models that Agno has for such servers."""
    from agno.agent import Agent
    from agno.models.openai import OpenAIResponses
    from agno.models.openai.like import OpenAILike
    from agno.models.vllm import VLLM

    made = {"like": OpenAILike, "vllm": VLLM, "responses": OpenAIResponses}[kind]
    return Agent(model=made(id=model, base_url=f"{url}/v1", api_key=KEY), **options)


def _agno_answer(run: Any) -> Any:
    """The content of a run. A failed run says so only in its status."""
    assert "ERROR" not in str(run.status).upper(), run.content
    return run.content


@case("agno", "OpenAILike, VLLM, OpenAIResponses: whole, streamed, a form")
def agno_chats(url: str, model: str) -> None:
    for kind in ("like", "vllm", "responses"):
        assert _agno_answer(_agno(kind, url, model).run(PROMPT))
        events = list(_agno(kind, url, model).run(PROMPT, stream=True, stream_events=True))
        assert events[-1].event == "RunCompleted" and events[-1].content
        found = _agno_answer(_agno(kind, url, model, output_schema=Reading).run(PROMPT))
        assert isinstance(found, Reading), kind


@case("agno", "tools: a named one, its result, the history")
def agno_tools(url: str, model: str) -> None:
    from agno.db.in_memory import InMemoryDb
    from agno.tools import tool

    @tool(stop_after_tool_call=True)  # or it would be forced again and again
    def report(unit: Unit, degrees: Literal[1, 2, 3]) -> str:
        """Report a temperature."""
        return f"{degrees} {unit}"

    for kind in ("like", "vllm"):
        agent = _agno(
            kind,
            url,
            model,
            tools=[report],
            tool_choice=NAMED,
            db=InMemoryDb(),
            add_history_to_context=True,
        )
        agent.model.max_tokens = 60
        run = agent.run(PROMPT)
        _agno_answer(run)
        assert run.tools and run.tools[0].tool_name == "report"
        agent.tool_choice = "none"
        _agno_answer(agent.run(PROMPT))


@case("agno", "OpenAIEmbedder")
def agno_embedder(url: str, model: str) -> None:
    from agno.knowledge.embedder.openai import OpenAIEmbedder

    # Its default asks for 1,536 dimensions, which the embedded model does not have.
    embedder = OpenAIEmbedder(id=model, base_url=f"{url}/v1", api_key=KEY, dimensions=256)
    assert len(embedder.get_embedding("a")) == 256


# ---- llm, a command -----------------------------------------------------------------------------

_LLM_MODELS = """\
- {{model_id: served, model_name: {model}, api_base: '{url}/v1', supports_schema: true,
   supports_tools: true}}
- {{model_id: served-completion, model_name: {model}, api_base: '{url}/v1', completion: true}}
"""


@contextmanager
def _llm_home(url: str, model: str) -> Iterator[dict[str, str]]:
    """The environment of the command, with a folder that names the models."""
    with tempfile.TemporaryDirectory() as folder:
        models = _LLM_MODELS.format(url=url, model=model)
        (Path(folder) / "extra-openai-models.yaml").write_text(models)
        yield os.environ | {"LLM_USER_PATH": folder}


def _llm(environment: dict[str, str], *arguments: str, typed: str | None = None) -> str:
    """The output of the command. typed: its standard input."""
    source = {"stdin": subprocess.DEVNULL} if typed is None else {"input": typed}
    done = subprocess.run(
        [sys.executable, "-m", "llm", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **source,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@case("llm", "a prompt, whole and streamed; a conversation; completions")
def llm_prompts(url: str, model: str) -> None:
    with _llm_home(url, model) as environment:
        assert "served" in _llm(environment, "models", "list")
        streamed = _llm(environment, "-m", "served", PROMPT, "-o", "temperature", "0")
        whole = _llm(environment, "-m", "served", "--no-stream", PROMPT, "-o", "temperature", "0")
        assert whole == streamed and whole.strip()
        assert _llm(environment, "-c", "And the air?", "-o", "max_tokens", "8").strip()
        talk = _llm(environment, "chat", "-m", "served", typed="hello\nand you?\nquit\n")
        assert len(talk.splitlines()) > 5
        completion = _llm(environment, "-m", "served-completion", "import", "-o", "max_tokens", "8")
        assert completion.strip()


@case("llm", "--schema; --functions")
def llm_tools(url: str, model: str) -> None:
    with _llm_home(url, model) as environment:
        found = _llm(environment, "-m", "served", "--schema", json.dumps(PARAMETERS), PROMPT)
        Reading.model_validate_json(found)
        function = 'def report(unit: str) -> str:\n    "Report a temperature."\n    return "noted"'
        _llm(environment, "-m", "served", "--functions", function, PROMPT, "-o", "max_tokens", "8")


if __name__ == "__main__":
    main()
