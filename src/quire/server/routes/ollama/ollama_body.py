"""The bodies of Ollama's API, and their conversion to a chat call and params.

Options for running a model (`num_ctx`, `num_gpu`) are accepted without effect. So are `keep_alive`
and a call without a prompt, by which Ollama's clients load and unload models, unless the server
unloads an idle model.
Other unknown fields are ignored and named in a header of the answer.
"""

import json
from abc import abstractmethod
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar

from pydantic import Field, field_validator

from quire.core.sampling_params import SamplingParams
from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import InvalidRequestError, shown
from quire.server.generation.call_body import HINTS, ChatBody, Params, left_out
from quire.server.generation.chat_call import ChatCall, ReasoningOptions
from quire.server.http.body import UnknownFields, with_whole_numbers
from quire.server.limits import CallLimits, too_many_entries
from quire.server.routes.openai.chat_tools import (
    MAX_LABELS,
    labels_of_tools,
    make_tool_use,
    openai_tools,
)
from quire.text.tool_messages import check_num_arguments

_TAG = ":latest"

_PARAMS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
"""Maps names in Ollama's `options` to fields of SamplingParams."""

_UNLOAD = ("0", "0.0")
"""Values of `keep_alive`, without a unit, that ask to unload the model."""

_WHOLE = ("top_k", "seed", "num_predict")

_HINTS = frozenset(
    {"num_ctx", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "use_mmap", "use_mlock"}
) | {"numa", "num_thread", "num_keep", "vocab_only", "logits_all", "embedding_only"}

_FORMAT = {"anyOf": [{"enum": ["", "json"]}, {"type": "object"}]}
_MESSAGE: dict[str, Any] = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"type": "string", "minLength": 1},
        "content": {"type": "string"},
        "thinking": {"type": "string"},
        "tool_name": {"type": "string"},
        "tool_calls": {"type": "array", "items": {"type": "object"}},
    },
}

_MESSAGE_FIELDS = (*_MESSAGE["properties"], "name", "images")


def without_tag(name: str | None) -> str | None:
    """A model's name without Ollama's default tag, `:latest`."""
    return None if name is None else name.removesuffix(_TAG)


def untagged(name: Any) -> Any:
    """A name of any type without Ollama's default tag."""
    return without_tag(name) if isinstance(name, str) else name


class OllamaBody(ChatBody):
    """The fields that the bodies of /api/chat and /api/generate share."""

    unknown_fields: ClassVar[UnknownFields] = "ignore"
    list_bounds: ClassVar[Mapping[str, str]] = {"options": "max_list_length"}
    hints: ClassVar[frozenset[str]] = HINTS | {"parallel_tool_calls", "user"}
    not_supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "images": ([],),
        "logprobs": (False,),
        "top_logprobs": (0,),
    }
    notes: ClassVar[Mapping[str, str]] = {
        "model": "the name in `/api/tags`, with or without `:latest`",
        "stream": "false: one object; else a line for each piece",
        "format": "`json`, or a JSON schema that the answer obeys",
        "options": "`temperature`, `top_k`, `top_p`, `min_p`, `seed`, `stop`, `num_predict` and "
        "the penalties; those for running a model are accepted, and change nothing",
        "keep_alive": "how long the model stays in memory after the call, as `5m`; -1: for good."
        " Only a server with `--idle-unload` obeys it, and only the operator",
        "think": "whether the model thinks before it answers, or how much: `low`, `medium`, `high`",
        "priority": "smaller goes first, under the policy `priority`",
        "cache_salt": "cached prefixes are shared only with calls that have the same salt and key",
        "deadline_s": "seconds after which the call ends with an error",
        "speculation_history": "false: the answer is not kept for drafts of later answers",
    }

    stream: bool = True
    format: Any = left_out(**_FORMAT)
    options: dict[str, Any] | None = None
    think: bool | str | None = None
    keep_alive: float | str | None = None

    @property
    @abstractmethod
    def has_prompt(self) -> bool:
        """Whether there is anything to answer. A call without it asks to load or unload."""

    @property
    def done_reason_without_prompt(self) -> str:
        """Ollama's reason why a call without a prompt is done."""
        return "unload" if str(self.keep_alive).rstrip("hms") in _UNLOAD else "load"

    @classmethod
    def needs_model(cls, fields: Mapping[str, Any]) -> bool:
        """See `Body`. A call without a prompt whose `keep_alive` is 0 unloads the model."""
        prompts = (fields.get(name) for name in ("messages", "prompt", "suffix"))
        has_prompt = any(each not in (None, "", []) for each in prompts)
        return has_prompt or str(fields.get("keep_alive")).rstrip("hms") not in _UNLOAD

    @classmethod
    def model_named(cls, fields: Mapping[str, Any]) -> Any:
        """See `Body`."""
        return untagged(super().model_named(fields))

    @classmethod
    def check_fields(
        cls, fields: Mapping[str, Any], limits: CallLimits, max_model_len: int
    ) -> None:
        super().check_fields(fields, limits, max_model_len)
        options = fields.get("options")
        stop = options.get("stop") if isinstance(options, dict) else None
        if isinstance(stop, list) and len(stop) > limits.max_stop_strings:
            raise too_many_entries("options.stop", stop, limits.max_stop_strings)

    @field_validator("model")
    @classmethod
    def _without_tag(cls, name: str | None) -> str | None:
        return without_tag(name)

    @property
    def labels(self) -> list[str]:
        """Names of unknown options, and of fields of messages and tools that have no effect."""
        known = _PARAMS.keys() | _HINTS
        return [f"options.{name}" for name in self.options or () if name not in known]

    def to_params(self) -> Params:
        """Raises InvalidRequestError."""
        options = dict(self.options or {})
        options |= {name: with_whole_numbers(options[name]) for name in _WHOLE if name in options}
        given = {
            ours: options[name] for name, ours in _PARAMS.items() if options.get(name) is not None
        }
        num_predict = given.get("max_tokens")
        if num_predict in (None, -1, -2):
            given["max_tokens"] = None  # generate until the context is full
        return Params(SamplingParams(**given))

    def _reasoning(self) -> ReasoningOptions:
        if isinstance(self.think, str):
            return ReasoningOptions(effort=self.think, is_enabled=True)
        return ReasoningOptions(is_enabled=self.think)

    def _answer_format(self) -> StructuredOutputsParams | None:
        if self.format in (None, ""):
            return None
        if self.format == "json":
            return StructuredOutputsParams(json_object=True)
        if isinstance(self.format, dict):
            return StructuredOutputsParams(json=self.format)
        raise InvalidRequestError(
            f"format is {shown(self.format)}, but must be json or a JSON schema", "format"
        )


class OllamaChatRequest(OllamaBody):
    """The body of POST /api/chat."""

    list_bounds: ClassVar[Mapping[str, str]] = {
        **OllamaBody.list_bounds,
        "tools": "max_list_length",
    }
    notes: ClassVar[Mapping[str, str]] = {
        "messages": "objects with a `role` and a `content`, calls in `tool_calls`",
        "tools": "functions that the model may call",
    }

    messages: Any = Field(default=[], json_schema_extra={"type": "array", "items": _MESSAGE})
    tools: Any = left_out(type="array", items={"type": "object"})

    @property
    def has_prompt(self) -> bool:
        return bool(self.messages != [])

    @property
    def labels(self) -> list[str]:
        return [*super().labels, *labels_of_tools(self.tools), *_labels(self.messages)]

    def to_chat_call(self, *, takes_images: bool = False) -> ChatCall:
        """Raises InvalidRequestError."""
        messages = list(_chat_messages(self.messages, takes_images=takes_images))
        if self.tools is not None and not isinstance(self.tools, list):
            raise InvalidRequestError(f"tools is {shown(self.tools)}, not a list", "tools")
        return ChatCall(
            messages=messages,
            tool_use=make_tool_use(openai_tools(self.tools or ()), None),
            reasoning=self._reasoning(),
            answer_format=self._answer_format(),
            continue_final_message=bool(messages) and messages[-1].get("role") == "assistant",
        )


class OllamaGenerateRequest(OllamaBody):
    """The body of POST /api/generate."""

    not_supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **{name: each for name, each in OllamaBody.not_supported.items() if name != "images"},
        "context": ([],),
        "template": ("",),
    }
    notes: ClassVar[Mapping[str, str]] = {
        "prompt": "the user's message",
        "images": "images of the message, in base64, where the model takes images",
        "system": "what the model is told before it",
        "raw": "the prompt is the model's raw input, without a chat template",
        "suffix": "the text after the gap that the answer fills; only where the model's tokenizer"
        " has tokens for that",
    }

    prompt: str = ""
    images: Any = left_out(type="array", items={"type": "string"})
    system: str | None = None
    raw: bool = False
    #: Text after the gap that the answer fills; "" is as None.
    suffix: str | None = None

    @property
    def has_prompt(self) -> bool:
        return bool(self.prompt or self.suffix or self.images)

    @property
    def is_raw(self) -> bool:
        """Whether the prompt becomes the model's input without a chat template."""
        return self.raw or bool(self.suffix)

    @property
    def raw_format(self) -> StructuredOutputsParams | None:
        """The form of the answer to a raw prompt. Raises InvalidRequestError for fields that only
        a chat template can obey."""
        fields = {"images": self.images, "system": self.system, "think": self.think}
        for name, value in fields.items():
            if value:
                raise InvalidRequestError(
                    f"{name} is set, but a raw prompt and one with a suffix have no chat template"
                    " that could obey it; leave it out",
                    name,
                )
        return self._answer_format()

    def to_chat_call(self, *, takes_images: bool = False) -> ChatCall:
        """Raises InvalidRequestError."""
        content: Any = self.prompt
        if self.images:
            if not takes_images:
                raise InvalidRequestError(
                    "images is not supported by this model, which takes text; leave it out",
                    "images",
                )
            content = _with_images(self.prompt, self.images, "images")
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        return ChatCall(
            messages=messages, reasoning=self._reasoning(), answer_format=self._answer_format()
        )


def _labels(messages: Any) -> list[str]:
    """Names of the fields in messages that have no effect, without duplicates."""
    found: dict[str, None] = {}
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            given = (name for name, value in message.items() if value is not None)
            unknown = (name for name in given if name not in _MESSAGE_FIELDS)
            found |= dict.fromkeys(islice(unknown, MAX_LABELS))
        if len(found) > MAX_LABELS:
            break
    return [f"messages.{name}" for name in found]


def _with_images(content: Any, images: Any, where: str) -> list[dict[str, Any]]:
    """Images in base64 and the text after them, as parts of OpenAI's API."""
    if not isinstance(images, list) or not all(isinstance(each, str) for each in images):
        raise InvalidRequestError(
            f"{where} is {shown(images)}, but must be a list of images in base64",
            where.partition("[")[0],
        )
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": f"data:;base64,{image}"}} for image in images
    ]
    return [*parts, {"type": "text", "text": content}] if content else parts


def _chat_messages(messages: Any, *, takes_images: bool) -> Iterator[dict[str, Any]]:
    """The messages in the form of OpenAI's chat API. Ollama's tool results have no id, so each is
    assigned to the first call of its tool that has no result yet."""
    if not isinstance(messages, list):
        raise _wrong(f"messages is {shown(messages)}, but must be a list of objects")
    open_ids: dict[str, deque[str]] = defaultdict(deque)
    num_calls = 0
    for at, message in enumerate(messages):
        if not isinstance(message, dict):
            raise _wrong(f"messages[{at}] is {shown(message)}, but must be an object with a role")
        if message.get("images") and not takes_images:
            raise _wrong(f"messages[{at}] has images, but the model takes text; leave them out")
        known = {name: message[name] for name in ("role", "content") if name in message}
        if message.get("images"):
            known["content"] = _with_images(
                message.get("content"), message["images"], f"messages[{at}].images"
            )
        if message.get("thinking"):
            known["reasoning_content"] = message["thinking"]
        calls = message.get("tool_calls") or []
        if calls:
            known["tool_calls"] = list(_calls(calls, f"messages[{at}]", num_calls))
            num_calls += len(calls)
            for call in known["tool_calls"]:
                open_ids[call["function"]["name"]].append(call["id"])
        name = message.get("tool_name", message.get("name"))
        if message.get("role") == "tool" and isinstance(name, str):
            known["name"] = name
            if open_ids[name]:
                known["tool_call_id"] = open_ids[name].popleft()
        yield known


def _calls(calls: Any, where: str, first: int) -> Iterator[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise _wrong(f"{where}.tool_calls is {shown(calls)}, but must be a list")
    for at, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str):
            raise _wrong(f"{where}.tool_calls[{at}] is {shown(call)}, but must name a function")
        check_num_arguments(function.get("arguments"), f"{where}.tool_calls[{at}] has arguments")
        arguments = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
        yield {
            "id": f"call_{first + at}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }


def _wrong(sentence: str) -> InvalidRequestError:
    return InvalidRequestError(sentence, "messages")
