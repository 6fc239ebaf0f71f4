"""Python clients against a running server, in their default forms: text, tools, structured output.

    python -m benchmarks.clients.all_clients --only python

installs them, starts a server and runs this; `cases` says what a case is.
"""

import json
import time
from typing import Any, ClassVar

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
    is_reading,
    main,
)

# ---- openai -------------------------------------------------------------------------------------


def _openai(url: str) -> Any:
    import openai

    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


@case("openai", "chat, with hints")
def openai_hints(url: str, model: str) -> None:
    answer = _openai(url).chat.completions.create(
        model=model,
        messages=MESSAGES,
        max_tokens=8,
        metadata={},
        prompt_cache_key="k",
        safety_identifier="s",
        store=True,
        service_tier="auto",
        verbosity="medium",
        reasoning_effort="none",
    )
    assert answer.choices[0].message.role == "assistant"


@case("openai", "chat.completions.parse")
def openai_parse(url: str, model: str) -> None:
    answer = _openai(url).chat.completions.parse(
        model=model, messages=MESSAGES, response_format=Reading
    )
    assert isinstance(answer.choices[0].message.parsed, Reading)


@case("openai", "tools: required, streamed")
def openai_tools(url: str, model: str) -> None:
    with _openai(url).chat.completions.stream(
        model=model,
        messages=MESSAGES,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
    ) as stream:
        answer = stream.get_final_completion()
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    for call in choice.message.tool_calls:
        assert call.function.name == "report"
        Reading.model_validate_json(call.function.arguments)


@case("openai", "tools: a loop")
def openai_loop(url: str, model: str) -> None:
    client = _openai(url)
    first = client.chat.completions.create(
        model=model,
        messages=MESSAGES,
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "report"}},
    )
    message = first.choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "noted"} for call in message.tool_calls
    ]
    history = [*MESSAGES, message.model_dump(exclude_none=False), *results]
    second = client.chat.completions.create(
        model=model, messages=history, tools=[TOOL], tool_choice="none", max_tokens=8
    )
    assert second.choices[0].message.content


@case("openai", "responses.parse")
def openai_responses_parse(url: str, model: str) -> None:
    answer = _openai(url).responses.parse(model=model, input=PROMPT, text_format=Reading)
    assert isinstance(answer.output_parsed, Reading)


@case("openai", "responses: tools, streamed")
def openai_responses_tools(url: str, model: str) -> None:
    tool = {"type": "function", "strict": True, **FUNCTION}
    with _openai(url).responses.stream(
        model=model,
        input=PROMPT,
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
    ) as stream:
        answer = stream.get_final_response()
    calls = [item for item in answer.output if item.type == "function_call"]
    assert calls and Reading.model_validate_json(calls[0].arguments)


@case("openai", "files and batches")
def openai_batches(url: str, model: str) -> None:
    client = _openai(url)
    body = {"messages": MESSAGES, "max_tokens": 4}
    call = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    file = client.files.create(file=("calls.jsonl", json.dumps(call).encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    while batch.status not in ("completed", "failed", "expired"):
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    (answer,) = client.files.content(batch.output_file_id).text.splitlines()
    assert json.loads(answer)["response"]["status_code"] == 200
    assert client.files.delete(file.id).deleted


@case("openai", "embeddings")
def openai_embeddings(url: str, model: str) -> None:
    found = _openai(url).embeddings.create(model=model, input=["a", "b"])
    assert len(found.data) == 2 and len(found.data[0].embedding) > 8


# ---- anthropic ----------------------------------------------------------------------------------


@case("anthropic", "messages: tools, streamed")
def anthropic_tools(url: str, model: str) -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)
    tool = {"name": "report", "description": "Report.", "input_schema": PARAMETERS}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    with client.messages.stream(
        model=model, max_tokens=32000, messages=MESSAGES, tools=[tool], tool_choice=choice
    ) as stream:
        message = stream.get_final_message()
    assert message.stop_reason == "tool_use"
    assert all(is_reading(block.input) for block in message.content if block.type == "tool_use")


@case("anthropic", "count_tokens")
def anthropic_count(url: str, model: str) -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)
    counted = client.messages.count_tokens(model=model, messages=MESSAGES, system="Be brief.")
    answer = client.messages.create(
        model=model, messages=MESSAGES, system="Be brief.", max_tokens=4
    )
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


# ---- LiteLLM ------------------------------------------------------------------------------------


@case("litellm", "completion: reasoning_effort, JSON, tools")
def litellm_completion(url: str, model: str) -> None:
    import litellm

    common = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": KEY}
    litellm.drop_params = True
    litellm.completion(**common, messages=MESSAGES, max_tokens=4, reasoning_effort="low")
    found = litellm.completion(**common, messages=MESSAGES, response_format=Reading)
    Reading.model_validate_json(found.choices[0].message.content)
    called = litellm.completion(
        **common, messages=MESSAGES, tools=[TOOL], tool_choice="required", max_tokens=200
    )
    assert called.choices[0].message.tool_calls


@case("litellm", "responses()")
def litellm_responses(url: str, model: str) -> None:
    import litellm

    answer = litellm.responses(
        model=f"openai/{model}",
        api_base=f"{url}/v1",
        api_key=KEY,
        input=PROMPT,
        max_output_tokens=16,
    )
    assert answer.output


@case("litellm", "embedding")
def litellm_embedding(url: str, model: str) -> None:
    import litellm

    found = litellm.embedding(
        model=f"openai/{model}", api_base=f"{url}/v1", api_key=KEY, input=["a"]
    )
    assert len(found.data) == 1


# ---- LangChain ----------------------------------------------------------------------------------


def _langchain(url: str, model: str, **options: Any) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model=model, base_url=f"{url}/v1", api_key=KEY, max_retries=0, **options)


@case("langchain-openai", "with_structured_output")
def langchain_structured(url: str, model: str) -> None:
    for method in ("json_schema", "function_calling"):
        found = _langchain(url, model).with_structured_output(Reading, method=method).invoke(PROMPT)
        assert isinstance(found, Reading), method


@case("langchain-openai", "json_mode")
def langchain_json_mode(url: str, model: str) -> None:
    answer = _langchain(url, model, max_tokens=16).bind(response_format={"type": "json_object"})
    assert answer.invoke(PROMPT).content.startswith("{")


@case("langchain-openai", "bind_tools, reasoning_effort")
def langchain_tools(url: str, model: str) -> None:
    chat = _langchain(url, model, max_tokens=200, reasoning_effort="low")
    assert chat.bind_tools([TOOL], tool_choice="any").invoke(PROMPT).tool_calls
    _langchain(url, model, max_tokens=8).bind_tools([TOOL]).invoke(PROMPT)


@case("langchain-openai", "embeddings")
def langchain_embeddings(url: str, model: str) -> None:
    from langchain_openai import OpenAIEmbeddings

    made = OpenAIEmbeddings(
        model=model, base_url=f"{url}/v1", api_key=KEY, check_embedding_ctx_length=False
    )
    assert len(made.embed_documents(["a", "b"])) == 2


# ---- agents -------------------------------------------------------------------------------------


@case("openai-agents", "the default Runner, tools, metadata")
def openai_agents(url: str, model: str) -> None:
    import agents
    import openai

    @agents.function_tool
    def report(unit: Unit) -> str:
        """Report the unit of a temperature."""
        return "noted"

    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    agents.set_default_openai_client(client, use_for_tracing=False)
    agents.set_tracing_disabled(True)
    settings = agents.ModelSettings(
        tool_choice="required", max_tokens=200, metadata={"run": "1"}, parallel_tool_calls=False
    )
    agent = agents.Agent("reporter", tools=[report], model=model, model_settings=settings)
    result = agents.Runner.run_sync(agent, PROMPT)  # after a forced call the choice is reset
    assert any(item.type == "tool_call_output_item" for item in result.new_items)


@case("pydantic-ai", "output_type; PromptedOutput")
def pydantic_ai(url: str, model: str) -> None:
    from pydantic_ai import Agent, NativeOutput, PromptedOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    served = OpenAIChatModel(model, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=KEY))
    for output_type in (Reading, NativeOutput(Reading)):
        found = Agent(served, output_type=output_type).run_sync(PROMPT).output
        assert isinstance(found, Reading)
    agent = Agent(served, output_type=PromptedOutput(dict), model_settings={"max_tokens": 64})
    try:
        agent.run_sync(PROMPT)
    except Exception as error:  # an answer that was cut off is the model's fault, not the server's
        assert "status_code" not in str(error), error


@case("instructor", "the default (a named function); JSON mode")
def instructor(url: str, model: str) -> None:
    import instructor as library

    made = library.from_openai(_openai(url))
    found = made.chat.completions.create(model=model, messages=MESSAGES, response_model=Reading)
    assert isinstance(found, Reading)
    made = library.from_openai(_openai(url), mode=library.Mode.JSON_SCHEMA)
    found = made.chat.completions.create(model=model, messages=MESSAGES, response_model=Reading)
    assert isinstance(found, Reading)


@case("smolagents", "a model with tools")
def smolagents(url: str, model: str) -> None:
    from smolagents import OpenAIServerModel, Tool
    from smolagents.models import ChatMessage

    class Report(Tool):
        name = "report"
        description = "Reports a temperature."
        inputs: ClassVar[Any] = {
            "unit": {"type": "string", "enum": ["C", "F"], "description": "its unit"}
        }
        output_type = "string"

        def forward(self, unit: str) -> str:
            return unit

    served = OpenAIServerModel(model, api_base=f"{url}/v1", api_key=KEY, max_tokens=200)
    message: ChatMessage = served.generate(
        [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}],
        tools_to_call_from=[Report()],
    )
    assert message.tool_calls


@case("dspy", "LM: a text, a form")
def dspy(url: str, model: str) -> None:
    import dspy as library
    import litellm

    litellm.drop_params = False  # it would drop the schema
    served = library.LM(f"openai/{model}", api_base=f"{url}/v1", api_key=KEY, cache=False)
    assert served(PROMPT, max_tokens=8)
    schema = {"name": "reading", "schema": PARAMETERS, "strict": True}
    (text,) = served(PROMPT, response_format={"type": "json_schema", "json_schema": schema})
    Reading.model_validate_json(text)


# ---- others -------------------------------------------------------------------------------------


@case("mistralai", "chat: random_seed, safe_prompt, tools")
def mistral(url: str, model: str) -> None:
    from mistralai.client import Mistral

    client = Mistral(api_key=KEY, server_url=url)
    client.chat.complete(
        model=model, messages=MESSAGES, random_seed=3, safe_prompt=False, max_tokens=4
    )
    called = client.chat.complete(
        model=model, messages=MESSAGES, tools=[TOOL], tool_choice="any", max_tokens=200
    )
    assert called.choices[0].message.tool_calls


@case("huggingface_hub", "chat_completion with response_format and tools")
def hugging_face(url: str, model: str) -> None:
    from huggingface_hub import InferenceClient

    client = InferenceClient(base_url=f"{url}/v1", api_key=KEY)
    schema = {"name": "reading", "schema": PARAMETERS, "strict": True}
    answer = client.chat_completion(
        MESSAGES, model=model, response_format={"type": "json_schema", "json_schema": schema}
    )
    Reading.model_validate_json(answer.choices[0].message.content)
    called = client.chat_completion(
        MESSAGES, model=model, tools=[TOOL], tool_choice="required", max_tokens=200
    )
    assert called.choices[0].message.tool_calls


@case("ollama", "chat, generate, embed, list, show, ps, pull")
def ollama(url: str, model: str) -> None:
    from ollama import Client

    client = Client(host=url)
    assert client.list().models and client.ps().models
    assert "completion" in client.show(model).capabilities
    assert client.pull(model).status == "success"
    assert len(client.embed(model=model, input=["a", "b"]).embeddings) == 2
    assert client.embeddings(model=model, prompt="a").embedding
    assert client.generate(model=model, prompt="import", raw=True, options={"num_predict": 4}).done
    assert client.chat(model=model, messages=MESSAGES, options={"num_predict": 4}).message.content
    pieces = list(client.generate(model=model, prompt="import", stream=True))
    assert pieces[-1].done
    found = client.chat(model=model, messages=MESSAGES, format=Reading.model_json_schema())
    Reading.model_validate_json(found.message.content)


@case("llama-index-llms-openai-like", "complete, structured_predict")
def llama_index(url: str, model: str) -> None:
    from llama_index.core.prompts import PromptTemplate
    from llama_index.llms.openai_like import OpenAILike

    served = OpenAILike(
        model=model,
        api_base=f"{url}/v1",
        api_key=KEY,
        is_chat_model=True,
        is_function_calling_model=True,
        max_tokens=200,
        context_window=2048,
    )
    assert served.complete(PROMPT).text
    assert isinstance(served.structured_predict(Reading, PromptTemplate(PROMPT)), Reading)


if __name__ == "__main__":
    main()
