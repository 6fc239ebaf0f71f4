"""Every chat API makes one prompt of an image, equal to transformers' own."""

import asyncio
import base64
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.images.pictures import file_of, random_picture
from tests.images.test_video import FRAMES, animation
from tests.images.tiny_folders import write_qwen, write_smolvlm
from transformers import PreTrainedTokenizerFast
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

from quire.core.request import Request
from quire.core.sampling_params import ModelLimits, SamplingParams
from quire.engine_client.image_prompts import ImagePrompts, make_reader
from quire.engine_client.inputs import InputProcessor, read_prompt
from quire.errors import InvalidRequestError
from quire.images.image_options import ImageOptions
from quire.server.generation.call_body import Params
from quire.server.generation.chat_prompt import ChatPrompt, chat_call_of, chat_prompt
from quire.server.routes.anthropic.messages_body import CountTokensRequest
from quire.server.routes.ollama.ollama_body import OllamaChatRequest, OllamaGenerateRequest
from quire.server.routes.openai.chat_body import ChatCompletionRequest
from quire.server.routes.openai.responses.request_body import ResponsesRequest
from quire.server.routes.vllm.tokenize import TokenizeRequest
from quire.server.service import Service
from quire.text.chat_template import ChatTemplate
from quire.text.tokenizer import Tokenizer

LIMITS = ModelLimits(vocab_size=1000, max_model_len=512, max_content_tokens=64)
PICTURE = random_picture(90, 50)
BASE64 = base64.b64encode(file_of(PICTURE)).decode()
URL = f"data:image/png;base64,{BASE64}"
QUESTION = "What is it?"
PART = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}
TEXT = {"type": "text", "text": QUESTION}
ANTHROPIC_IMAGE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": BASE64},
}


def service_of(folder: Path, limits: ModelLimits = LIMITS, **options: Any) -> Service:
    tokenizer = Tokenizer.from_folder(folder)
    engine: Any = SimpleNamespace(limits=limits)
    return Service(
        engine,
        tokenizer,
        ChatTemplate.from_folder(folder),
        "mine",
        images=make_reader(folder, ImageOptions(**options), tokenizer),
    )


@pytest.fixture(scope="module")
def smolvlm(tmp_path_factory: pytest.TempPathFactory) -> Service:
    return service_of(write_smolvlm(tmp_path_factory.mktemp("models") / "smolvlm"))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Service:
    return service_of(write_qwen(tmp_path_factory.mktemp("models") / "qwen"))


def prompt_of(service: Service, body: Any) -> ChatPrompt:
    async def make() -> ChatPrompt:
        return await chat_prompt(service, await chat_call_of(service, body))

    return asyncio.run(make())


def chat(*content: Any, **fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate(
        {"messages": [{"role": "user", "content": list(content)}], **fields}
    )


BODIES = {
    "chat": chat(PART, TEXT),
    "chat with a URL as text": chat({"type": "image_url", "image_url": URL}, TEXT),
    "tokenize": TokenizeRequest.model_validate(
        {"messages": [{"role": "user", "content": [PART, TEXT]}]}
    ),
    "responses": ResponsesRequest.model_validate(
        {
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_image", "image_url": URL, "detail": "auto"},
                        {"type": "input_text", "text": QUESTION},
                    ],
                }
            ]
        }
    ),
    "messages": CountTokensRequest.model_validate(
        {"messages": [{"role": "user", "content": [ANTHROPIC_IMAGE, TEXT]}]}
    ),
    "messages with a URL": CountTokensRequest.model_validate(
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image", "source": {"type": "url", "url": URL}}, TEXT],
                }
            ]
        }
    ),
    "ollama chat": OllamaChatRequest.model_validate(
        {"messages": [{"role": "user", "content": QUESTION, "images": [BASE64]}]}
    ),
    "ollama generate": OllamaGenerateRequest.model_validate(
        {"prompt": QUESTION, "images": [BASE64]}
    ),
}


def theirs(service: Service, text: str, picture: Any) -> list[int]:
    """The tokens that transformers' processor makes of a prompt with one placeholder."""
    fields = {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 64}}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=service.tokenizer._backend)
    processor: Any = Idefics3Processor(Idefics3ImageProcessorPil(**fields), tokenizer, 4)
    found = processor(text=[text], images=[[picture]], add_special_tokens=False)
    return list(found["input_ids"][0])


@pytest.mark.parametrize("name", BODIES)
def test_each_api_makes_the_prompt_of_transformers(smolvlm: Service, name: str) -> None:
    prompt = prompt_of(smolvlm, BODIES[name])
    text = f"<|im_start|>User:<image>{QUESTION}<end_of_utterance>\nAssistant:"
    assert prompt.token_ids == theirs(smolvlm, text, PICTURE)
    (images,) = prompt.images
    mark = smolvlm.tokenizer.token_ids["<image>"]
    covered = [at for span in images.spans for at in range(span.first_position, span.end)]
    assert covered == [at for at, each in enumerate(prompt.token_ids) if each == mark]
    assert len(images.spans) == len(images.contents) == 5  # four tiles and the whole
    assert list(prompt.left_out) == []


def test_the_request_has_the_images(smolvlm: Service) -> None:
    prompt = prompt_of(smolvlm, BODIES["chat"])
    inputs = InputProcessor(smolvlm.tokenizer, LIMITS)

    def request_of(**params: Any) -> Request:
        wanted = Params(SamplingParams(**params)).sampling
        made = inputs.make_request("0", prompt.token_ids, wanted, seed=0)
        return inputs.with_images(made, prompt.images_of(0))

    request = request_of()
    images = prompt.images[0].in_domain(request.cache_domain)
    assert (request.content_spans, request.contents) == (images.spans, images.contents)
    with pytest.raises(InvalidRequestError, match="would cut the prompt"):
        request_of(truncate_prompt_tokens=5)


def test_written_placeholders_stay_text(smolvlm: Service) -> None:
    prompt = prompt_of(smolvlm, chat({"type": "text", "text": "<image> or <IMAGE>"}, PART, TEXT))
    mark = smolvlm.tokenizer.token_ids["<image>"]
    assert prompt.token_ids.count(mark) == 20
    assert prompt.images[0].spans[0].first_position > 20
    assert "<image> or <IMAGE>" in smolvlm.tokenizer.decode(prompt.token_ids)
    for text in ("<image>", "<ima"):
        split = chat({"type": "text", "text": text}, PART, {"type": "text", "text": "ge>"})
        assert prompt_of(smolvlm, split).token_ids.count(mark) == 20
        assert prompt_of(smolvlm, chat({"type": "text", "text": text})).token_ids.count(mark) == 0


RESULT_BODY = CountTokensRequest.model_validate(
    {
        "messages": [
            {"role": "user", "content": "look"},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "t", "name": "see", "input": {}}],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t",
                        "content": [TEXT, ANTHROPIC_IMAGE],
                    }
                ],
            },
        ]
    }
)


def test_images_of_tool_results_are_placed_or_named(smolvlm: Service, qwen: Service) -> None:
    placed = prompt_of(qwen, RESULT_BODY)
    assert len(placed.images[0].spans) == 1
    text = qwen.tokenizer.decode(placed.token_ids, skip_special_tokens=False)
    assert f"{QUESTION}<|vision_start|><|image_pad|>" in text
    named = prompt_of(smolvlm, RESULT_BODY)
    assert named.images[0].spans == ()
    assert "[image left out: only text can be read]" in smolvlm.tokenizer.decode(named.token_ids)
    assert list(named.left_out) == ["messages.content.content (image)"]


TOOL_RESULTS = {
    "messages.content (image_url)": ChatCompletionRequest.model_validate(
        {"messages": [{"role": "user", "content": "look"}, {"role": "tool", "content": [PART]}]}
    ),
    "messages.content.content (image)": RESULT_BODY,
    "input.output (input_image)": ResponsesRequest.model_validate(
        {
            "input": [
                {"type": "function_call", "call_id": "c", "name": "see", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "c",
                    "output": [{"type": "input_image", "image_url": URL}],
                },
            ]
        }
    ),
}


@pytest.mark.parametrize("name", TOOL_RESULTS)
def test_an_image_that_is_left_out_has_the_name_of_its_api(smolvlm: Service, name: str) -> None:
    """Whether the model reads no images, or its template places none in results of tools."""
    limits = ModelLimits(vocab_size=1000, max_model_len=512)
    for service in (smolvlm, replace(smolvlm, engine=SimpleNamespace(limits=limits))):
        assert list(prompt_of(service, TOOL_RESULTS[name]).left_out) == [name]


def test_several_images_keep_their_order(qwen: Service) -> None:
    other = base64.b64encode(file_of(random_picture(60, 60, 1))).decode()
    second = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{other}"}}
    (images,) = prompt_of(qwen, chat(PART, second, PART)).images
    first, middle, last = images.spans
    assert first.digest == last.digest != middle.digest
    assert len(images.contents) == 2 and middle.grid == (1, 2, 2)


def test_animations_are_videos(qwen: Service) -> None:
    """The same prompt as of the frames in Python; files that are no animations are refused."""

    def part(kind: str, data: bytes) -> dict[str, Any]:
        url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
        return {"type": "video_url", "video_url": {"url": url}}

    found = prompt_of(qwen, chat(part("image/webp", animation("WEBP")), PART, TEXT))
    in_python = {"type": "video", "video": FRAMES, "fps": 5.0}
    images = ImagePrompts(qwen.images, qwen.tokenizer, LIMITS)
    messages = [{"role": "user", "content": [in_python, PART, TEXT]}]
    expected = images.read(images.render(qwen.chat_template, messages))
    assert found.token_ids == expected.prompt
    assert found.images == [expected.images]
    assert len(found.images[0].spans) == 2 + 1, "two pairs of frames, and an image"
    with pytest.raises(InvalidRequestError, match="such as MP4, are not decoded"):
        prompt_of(qwen, chat(part("video/mp4", b"\0\0\0\x20ftypisom" + bytes(99))))
    with pytest.raises(InvalidRequestError, match="has 5 videos, but may have at most 4"):
        prompt_of(qwen, chat(*[part("image/gif", animation("GIF"))] * 5))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([{"type": "video_url", "video_url": {"url": URL}}, PART], "model takes none"),
        ([{"type": "input_audio", "input_audio": {}}, PART], "type 'input_audio'"),
        ([{"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}], "use data:"),
        ([PART] * 17, "has 17 images, but may have at most 16"),
    ],
)
def test_other_media_are_refused(smolvlm: Service, content: list[Any], reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as refused:
        prompt_of(smolvlm, chat(*content))
    assert refused.value.param == "messages"


def test_models_and_servers_without_images_refuse_them(tmp_path: Path) -> None:
    folder = write_smolvlm(tmp_path / "model")
    for service in (
        service_of(folder, ModelLimits(vocab_size=1000, max_model_len=512)),
        service_of(folder, limit_mm_per_prompt={"image": 0}),
    ):
        for name, body in BODIES.items():
            with pytest.raises(InvalidRequestError, match=r"text|images is not supported") as no:
                prompt_of(service, body)
            assert no.value.param in ("messages", "input", "images"), name


def test_prompts_of_the_offline_api(smolvlm: Service) -> None:
    tokenizer = smolvlm.tokenizer
    images = ImagePrompts(smolvlm.images, tokenizer, LIMITS)
    text = f"<|im_start|>User:<image>{QUESTION}"
    given = images.read(read_prompt({"prompt": text, "multi_modal_data": {"image": PICTURE}}))
    assert given.prompt == theirs(smolvlm, text, PICTURE)
    assert len(given.images.spans) == 5
    by_ids = {"prompt_token_ids": tokenizer.encode(text), "multi_modal_data": {"image": [PICTURE]}}
    assert images.read(read_prompt(by_ids | {"multi_modal_uuids": {"image": ["a"]}})) == given
    asked = [{"role": "user", "content": [{"type": "image", "image": PICTURE}, TEXT]}]
    chat_text = f"{text}<end_of_utterance>\nAssistant:"
    rendered = images.read(images.render(smolvlm.chat_template, asked))
    assert rendered.prompt == theirs(smolvlm, chat_text, PICTURE)
    # With the size of one tile, the picture is not cut.
    settings = {"mm_processor_kwargs": {"size": {"longest_edge": 64}}}
    whole = images.read(read_prompt({**by_ids, **settings}))
    assert len(whole.images.spans) == 1 and len(whole.prompt) < len(given.prompt)
    assert images.read(read_prompt({**by_ids, "mm_processor_kwargs": {}})) == given
    for wrong, reason in (
        ({**by_ids, "mm_processor_kwargs": {"fps": 1}}, "fps is no setting"),
        ({**by_ids, "mm_processor_kwargs": {"size": 3}}, "size of the image processor is 3"),
        ({**by_ids, "mm_processor_kwargs": {"image_mean": [10**400] * 3}}, "to 1e.09"),
        ({**by_ids, "mm_processor_kwargs": {"image_std": [1e-45] * 3}}, "nearer to 0"),
        ({**by_ids, "mm_processor_kwargs": {"rescale_factor": 1e308}}, "a number from"),
        ({**by_ids, "mm_processor_kwargs": [1]}, "must be an object"),
        ({"prompt": "a", "mm_processor_kwargs": {"fps": 1}}, "fps is no setting"),
        ({"prompt": "no place", "multi_modal_data": {"image": PICTURE}}, "0 placeholders"),
        ({"prompt": text, "multi_modal_data": {"video": PICTURE}}, "takes images only"),
        ({"prompt": text, "multi_modal_data": {"audio": np.zeros(3)}}, "only images and videos"),
        ({"prompt": text, "multi_modal_data": [PICTURE]}, "must be"),
        ({"prompt": text, "multi_modal_data": {"image": [PICTURE, None]}}, "None for an image"),
        ({"prompt": text, "multi_modal_uuids": {"image": "a"}}, "names 1 images, but .* has 0"),
        ({"prompt": text, "multi_modal_uuids": ["a"]}, "must be"),
    ):
        with pytest.raises(InvalidRequestError, match=reason):
            images.read(read_prompt(wrong))
    text_only = ImagePrompts(None, tokenizer, LIMITS)
    with pytest.raises(InvalidRequestError, match="the model takes text"):
        text_only.read(read_prompt({"prompt": text, "multi_modal_data": {"image": PICTURE}}))
    with pytest.raises(InvalidRequestError, match="only text is taken here"):
        text_only.read(read_prompt({"prompt": text, **settings}))


def test_settings_of_a_call(smolvlm: Service, tmp_path: Path) -> None:
    """With the size of one tile, the picture is not cut."""
    settings = {"mm_processor_kwargs": {"size": {"longest_edge": 64}}}
    cut, whole = (prompt_of(smolvlm, chat(PART, TEXT, **fields)) for fields in ({}, settings))
    assert [len(each.images[0].spans) for each in (cut, whole)] == [5, 1]
    tokens = TokenizeRequest.model_validate(
        {"messages": [{"role": "user", "content": [PART, TEXT]}], **settings}
    )
    assert prompt_of(smolvlm, tokens).token_ids == whole.token_ids
    # Settings of a call without images are checked, too.
    text = prompt_of(smolvlm, chat(TEXT, **settings))
    assert text.token_ids == prompt_of(smolvlm, chat(TEXT)).token_ids
    limits = ModelLimits(vocab_size=1000, max_model_len=512)
    text_only = service_of(write_smolvlm(tmp_path / "model"), limits)
    wrong = {"mm_processor_kwargs": {"fps": 1}}
    for service, body, reason in (
        (smolvlm, chat(PART, **wrong), "fps is no setting"),
        (smolvlm, chat(TEXT, **wrong), "fps is no setting"),
        (text_only, chat(TEXT, **settings), "only text is taken here"),
    ):
        with pytest.raises(InvalidRequestError, match=reason) as refused:
            prompt_of(service, body)
        assert refused.value.param == "mm_processor_kwargs"
