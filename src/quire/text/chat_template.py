"""Renders chat messages to the text of a prompt with the model's chat template.

Chat templates are Jinja programs that come with a model. They run with the same variables and in
the same kind of sandbox (`text.template_sandbox`) as in transformers. Called by the server's chat
API and by the offline API, which `quire chat` uses.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.errors import CheckpointError, InvalidRequestError
from quire.hub.model_files import shown_text
from quire.text.chat_messages import (
    IMAGE_PART,
    PART_ROLES,
    LeftOut,
    check_messages,
    check_roles,
    plain_value,
    with_joined_parts,
    with_role_renamed,
    with_text_as_parts,
    without_labels,
)
from quire.text.special_tokens import Escape
from quire.text.tokenizer_config import read_tokenizer_config
from quire.text.tool_messages import (
    arguments_object,
    arguments_text,
    with_arguments,
    with_calls_as_text,
    with_tools_as_text,
)

if TYPE_CHECKING:  # see `ChatTemplate`
    import jinja2

# Names that chat_template_kwargs may not set, since they are arguments of `render` or of
# transformers' apply_chat_template.
_RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"}
)
_WORD = re.compile(r"\w+")
# The same marker as in transformers. The space at its end shows whether the template strips
# messages.
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplate:
    """The compiled chat templates of one model. Without a template, rendering raises
    InvalidRequestError.

    Immutable after creation, so threads may share it.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        *,
        origin: str = "model",
    ) -> None:
        """`sources` maps template names to Jinja sources. "tool_use", if there is one, is used for
        calls with tools, and "default" otherwise.

        `special_tokens` are variables of every template, such as "bos_token". `origin` names the
        model in errors about the source, which clients do not see. Raises CheckpointError for a
        source that is not valid Jinja.
        """
        import jinja2  # only chats need it, and it takes 30 ms

        from quire.text.template_sandbox import make_environment  # the same

        environment = make_environment()
        self._sources = dict(sources)
        self._templates: dict[str, _Template] = {}
        for name, source in sources.items():
            try:
                compiled = environment.from_string(source)
            except jinja2.TemplateSyntaxError as error:
                raise CheckpointError(
                    f"the chat template {name!r} of {origin} is not valid Jinja: "
                    f"line {error.lineno}: {shown_text(error.message)}"
                ) from error
            except (RecursionError, MemoryError, SyntaxError, ValueError) as error:
                # For example very deeply nested brackets or blocks, or a number of 5,000 digits.
                raise CheckpointError(
                    f"the chat template {name!r} of {origin} can't be compiled: {shown_text(error)}"
                ) from error
            self._templates[name] = _Template(compiled, source, dict(special_tokens))

    @classmethod
    def from_folder(cls, folder: Path) -> "ChatTemplate":
        """The templates of the model in `folder`, which may be a GGUF file. Having no template is
        an error only when rendering.

        `chat_template.jinja` and `additional_chat_templates/*.jinja` replace the templates in
        tokenizer_config.json. Raises CheckpointError for a file that can't be read or compiled.
        """
        config = read_tokenizer_config(folder)
        sources = _file_sources(folder) or _config_sources(config.chat_template, folder)
        return cls(sources, config.special_token_texts, origin=str(folder))

    @classmethod
    def from_option(
        cls, template: str, folder: Path, origin: str = "--chat-template"
    ) -> "ChatTemplate":
        """A template in place of the model's own. `template` is a path or the Jinja source itself.
        `origin` names the template in errors.

        Raises CheckpointError for a template that can't be read or compiled.
        """
        is_source = "{" in template or "\n" in template
        source = template if is_source else _read(Path(template))
        return cls(
            {"default": source}, read_tokenizer_config(folder).special_token_texts, origin=origin
        )

    @property
    def source_for_tools(self) -> str | None:
        """The Jinja source of the template for calls with tools; None if the model has no
        template."""
        return self._sources.get("tool_use", self._sources.get("default"))

    @property
    def exists(self) -> bool:
        """True if the model has a chat template."""
        return bool(self._templates)

    def mentions(self, name: str, *, has_tools: bool = False) -> bool:
        """True if the template may read a variable or a message field of this name.

        `has_tools` selects the template for calls with tools, if the model has a separate one.
        """
        return self.exists and self._choose(has_tools=has_tools).mentions(name)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        escape: Escape | None = None,
    ) -> str:
        """The prompt text of `messages`.

        `messages`: mappings with a `role` and a `content`: a string, or a list of {"type": "text",
            "text": ...} parts. If the template accepts only strings, parts are joined by line
            breaks; if it accepts only parts, a string becomes one part.
        `add_generation_prompt`: end with the header of the assistant's next message.
        `continue_final_message`: end inside the last message, so that the model continues it.
        `tools`: JSON schemas of functions that the template describes to the model. If the template
            does not support tools, a system message describes them.
        `chat_template_kwargs`: further variables of the template, such as enable_thinking.
        `escape`: puts marks into special tokens in all of these arguments. The rendered text
            contains the marks, and only this object can encode it. None leaves special tokens as
            they are.
        Raises InvalidRequestError for messages that are malformed or that the template refuses.
        """
        rendering = self.prepare(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            escape=escape,
        )
        return rendering.text()

    def prepare(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        escape: Escape | None = None,
        leaves_out: bool = False,
        takes_images: bool = False,
    ) -> "Rendering":
        """Check and convert the arguments of `render`, without rendering.

        If leaves_out is set, labels in messages (fields that the template does not read) are
        dropped and listed in `Rendering.left_out`; otherwise they are refused. takes_images: the
        messages may have marks of images' places, see `image_parts`. The other arguments and errors
        are those of `render`."""
        if add_generation_prompt and continue_final_message:
            raise InvalidRequestError(
                "add_generation_prompt and continue_final_message exclude each other: the model "
                "either begins a message or continues the last one; set one of them to False",
                "continue_final_message",
            )
        # First, check everything that the client sent.
        variables = _check_variables(chat_template_kwargs)
        checked_tools = _check_tools(tools)
        template = self._choose(has_tools=checked_tools is not None)
        left_out: LeftOut | None = {} if leaves_out else None
        checked = check_messages(messages, left_out, takes_images=takes_images)
        check_roles(checked, template.mentions)
        checked = without_labels(checked, template.mentions, left_out)
        # Second, convert tool calls and tools to a form that this template reads.
        checked = template.with_readable_calls(checked)
        if checked_tools and not template.mentions("tools"):
            checked, checked_tools = with_tools_as_text(checked, checked_tools), None
        # Last, mark special tokens, and convert roles and contents.
        if escape is not None:
            checked, checked_tools, variables = escape.mark([checked, checked_tools, variables])
        shaped = template.shape(checked)
        variables |= {"tools": checked_tools, "add_generation_prompt": add_generation_prompt}
        return Rendering(template, shaped, variables, continue_final_message, left_out or {})

    def image_roles(
        self,
        placeholder: str,
        *,
        part: Mapping[str, str] = IMAGE_PART,
        has_tools: bool = False,
    ) -> frozenset[str]:
        """The roles in whose messages the template writes `placeholder` for `part`: "user", "tool",
        both or none. part: IMAGE_PART or VIDEO_PART. `has_tools` is as for `mentions`."""
        return self._choose(has_tools=has_tools).image_roles(placeholder, part)

    def _choose(self, *, has_tools: bool) -> "_Template":
        if not self._templates:
            raise InvalidRequestError(
                "the model has no chat template, so it can't take chat messages; send a text "
                "prompt instead (/v1/completions, LLM.generate), or put a chat_template.jinja into "
                "its folder; for a GGUF file, give one with --chat-template",
                "messages",
            )
        if has_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" not in self._templates:
            raise InvalidRequestError(
                f"the model has chat templates named {', '.join(sorted(self._templates))} but "
                "none named default; put one of them into its folder as chat_template.jinja",
                "messages",
            )
        return self._templates["default"]


@dataclass
class _Template:
    """A compiled template. Rendering probe messages shows which message forms it supports."""

    compiled: "jinja2.Template"
    source: str
    special_tokens: dict[str, str]

    def render(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        everything = {"documents": None, **self.special_tokens, **variables, "messages": messages}
        try:
            return self.compiled.render(everything)
        except _template_failures() as error:
            failure = InvalidRequestError(
                f"the model's chat template refuses these messages: {error}", "messages"
            )
            error.__traceback__ = None  # it would keep the template's intermediate values alive
        raise failure

    def mentions(self, name: str) -> bool:
        """True if the source contains this name, so that the template may read such a field."""
        return self._words.issuperset(_WORD.findall(name)) and name in self.source

    @cached_property
    def _words(self) -> frozenset[str]:
        return frozenset(_WORD.findall(self.source))

    def with_readable_calls(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with tool calls and results in a form that this template reads."""
        if not self.mentions("tool_calls"):
            return with_calls_as_text(messages)
        if not self._takes_argument_objects:
            return with_arguments(messages, arguments_text)
        # Checked again, since parsed text may be too deep or contain invalid characters.
        return with_arguments(
            messages, lambda arguments: plain_value(arguments_object(arguments), "messages")
        )

    def shape(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with roles and contents in a form that this template reads."""
        if not self.mentions("developer"):  # such a model was trained on system messages
            messages = with_role_renamed(messages, "developer", "system")
        if not self._takes_text and self._part_roles:
            messages = with_text_as_parts(messages)
        return with_joined_parts(messages, but_for=self._part_roles)

    @cached_property
    def _takes_text(self) -> bool:
        return "quire-probe" in self._probe([{"role": "user", "content": "quire-probe"}])

    @cached_property
    def _part_roles(self) -> frozenset[str]:
        """The roles whose content may be a list of parts, because the template renders all of them.

        Templates that don't support parts fail on a list, or write it in Python or JSON syntax.
        Some accept parts from users only, or read only the first part."""
        return frozenset(role for role in PART_ROLES if self._reads_parts(role))

    def _reads_parts(self, of_role: str) -> bool:
        texts = ["quire-probe-a", "quire-probe-b"]
        parts = [{"type": "text", "text": text} for text in texts]
        roles = ("system", "user", "assistant") if of_role == "system" else ("user", "assistant")
        rendered = self._probe(
            [
                {"role": role, "content": parts if role == of_role or not self._takes_text else "c"}
                for role in roles
            ]
        )
        return all(
            text in rendered and f"'{text}'" not in rendered and f'"{text}"' not in rendered
            for text in texts
        )

    @cached_property
    def _takes_argument_objects(self) -> bool:
        """True if a call's arguments may be an object. Templates that expect JSON text fail on an
        object, or write it in Python syntax."""
        as_object = self._probe(_probe_call({"quire-probe": 1}))
        if as_object and "'quire-probe'" not in as_object:
            return True
        return not self._probe(_probe_call('{"quire-probe": 1}'))

    def image_roles(self, placeholder: str, part: Mapping[str, str]) -> frozenset[str]:
        """See `ChatTemplate.image_roles`."""
        parts: list[dict[str, Any]] = [dict(part), {"type": "text", "text": "quire-probe"}]
        arguments: Any = {} if self._takes_argument_objects else "{}"
        calls = self.shape(_probe_call(arguments))
        result = {"role": "tool", "tool_call_id": "123456789", "name": "f", "content": parts}
        probes = {"user": [{"role": "user", "content": parts}], "tool": [*calls, result]}
        if not self.mentions("tool_calls"):
            del probes["tool"]
        rendered = {role: self._probe(messages) for role, messages in probes.items()}
        return frozenset(
            role
            for role, text in rendered.items()
            if text.count(placeholder) == 1 and "quire-probe" in text
        )

    def _probe(self, messages: list[dict[str, Any]]) -> str:
        try:
            return self.render(messages, {"tools": None, "add_generation_prompt": False})
        except InvalidRequestError:
            return ""


@dataclass(frozen=True, slots=True)
class Rendering:
    """A template with its converted messages and variables, ready to render."""

    template: _Template
    messages: list[dict[str, Any]]
    variables: dict[str, Any]
    continues_message: bool = False
    #: Names of the message fields that were dropped because the template does not read them.
    left_out: Collection[str] = ()

    def text(self) -> str:
        """The prompt's text. Raises InvalidRequestError if the template refuses the messages."""
        if self.continues_message:
            return _render_unfinished(self.template, self.messages, self.variables)
        return self.template.render(self.messages, self.variables)

    def beginning(self, text: str) -> str:
        """The part of the assistant's next message that the prompt `text` already contains.

        It is the message's header and any text after it. If the answer continues the last
        message, it is the text of that message."""
        if self.continues_message:
            return _tag_content(self.messages[-1])[1]
        if not self.variables["add_generation_prompt"]:
            return ""
        variables = {**self.variables, "add_generation_prompt": False}
        before = self.template.render(self.messages, variables)
        return text[_num_shared(text, before) :]


def _num_shared(first: str, second: str) -> int:
    """The length of the common prefix of two texts."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first.startswith(second[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low


def _probe_call(arguments: Any) -> list[dict[str, Any]]:
    # Mistral's templates require ids of nine characters.
    function = {"name": "f", "arguments": arguments}
    call = {"id": "123456789", "type": "function", "function": function}
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]


def _render_unfinished(
    template: _Template, messages: list[dict[str, Any]], variables: Mapping[str, Any]
) -> str:
    """Render with a tag at the end of the last message, and cut the text at the tag, as
    transformers does."""
    final, text = _tag_content(messages[-1])
    rendered = template.render([*messages[:-1], final], variables)
    tag = _CONTINUE_TAG.strip()
    if text.strip() not in rendered or tag not in rendered:
        raise InvalidRequestError(
            "continue_final_message is set, but the model's chat template does not write out the "
            "last message as it is",
            "continue_final_message",
        )
    position = rendered.rindex(tag)
    if rendered.startswith(_CONTINUE_TAG, position):
        return rendered[:position]
    return rendered[:position].rstrip()  # the template strips messages


def _tag_content(message: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The message with the tag at the end of its text, and its text without the tag."""
    content = message.get("content")
    if isinstance(content, str) and (content or "tool_calls" not in message):
        return {**message, "content": content + _CONTINUE_TAG}, content
    if not content or "text" not in content[-1]:
        raise InvalidRequestError(
            "continue_final_message is set, but the last message has no text to continue",
            "continue_final_message",
        )
    text = content[-1]["text"]
    tagged = {**content[-1], "text": text + _CONTINUE_TAG}
    return {**message, "content": [*content[:-1], tagged]}, text


def _check_variables(variables: Mapping[str, Any] | None) -> dict[str, Any]:
    if variables is None:
        return {}
    if not isinstance(variables, Mapping):
        raise InvalidRequestError(
            f"chat_template_kwargs is {variables!r}, but must map names to values",
            "chat_template_kwargs",
        )
    for name in variables:
        if name in _RESERVED_VARIABLES:
            raise InvalidRequestError(
                f"chat_template_kwargs has {name!r}, which is a separate option; set that option",
                "chat_template_kwargs",
            )
    plain: dict[str, Any] = plain_value(variables, "chat_template_kwargs")
    return plain


def _check_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[Any] | None:
    if tools is None:
        return None
    if not isinstance(tools, (list, tuple)):
        raise InvalidRequestError(f"tools is {tools!r}, but must be a list of objects", "tools")
    for position, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise InvalidRequestError(f"tools[{position}] is {tool!r}, not an object", "tools")
    return [plain_value(tool, "tools") for tool in tools]


def _file_sources(folder: Path) -> dict[str, str]:
    paths = {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    default = folder / "chat_template.jinja"
    if default.is_file():
        paths = {"default": default, **paths}
    sources = {name: _read(path) for name, path in paths.items()}
    return {name: source for name, source in sources.items() if source.strip()}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"the chat template {path} can't be read ({error})") from error


def _config_sources(chat_template: Any, folder: Path) -> dict[str, str]:
    if chat_template is None:
        return {}
    if isinstance(chat_template, str):
        return {"default": chat_template}
    try:
        sources = {entry["name"]: entry["template"] for entry in chat_template}
        if all(isinstance(text, str) for pair in sources.items() for text in pair):
            return sources
    except (TypeError, KeyError):
        pass
    raise CheckpointError(
        f"chat_template in {folder / 'tokenizer_config.json'} must be a string, or a list of "
        "objects with a name and a template"
    )


def _template_failures() -> tuple[type[Exception], ...]:
    """Errors that a template may raise, by a bug or for unusual messages."""
    from jinja2 import TemplateError  # imported by the template

    builtin = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
    return (TemplateError, *builtin)
