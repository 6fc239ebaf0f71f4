"""Messages between server and engine are decoded as encoded, and all other bytes are refused."""

import pickle
from dataclasses import replace

import msgspec
import pytest

from quire import errors
from quire.core.adapters import AdapterRef
from quire.core.request import FinishReason, Request, ResumedBranch, SequenceOutput
from quire.core.sampling_params import DecodingParams, ModelLimits, SamplingDefaults
from quire.core.step import TokenLogprobs
from quire.engine_client.messages import (
    AbortRequest,
    AdapterReply,
    AddRequest,
    BlocksReply,
    ClearPrefixes,
    Fatal,
    FindAdapter,
    GetBlocks,
    GetMemory,
    GetStats,
    MemoryReply,
    Outputs,
    Ping,
    Pong,
    Progress,
    Ready,
    RequestFailed,
    SetPaused,
    Shutdown,
    Start,
    StatsReply,
    decode_to_engine,
    decode_to_server,
    error_from,
    request_failed,
    start_error_from,
)
from quire.ipc import MessageError, encode

REF = AdapterRef("sql", "/adapters/sql", "0a1b")
PARAMS = DecodingParams(
    max_tokens=7,
    temperature=0.3,
    seed=2**64 - 1,
    end_token_ids=(0, 5),
    logprobs=3,
    logit_bias=((4, -2.5),),
    bad_words=((1, 2), (3,)),
    allowed_token_ids=(1, 2, 3),
)
BEAMS = DecodingParams(max_tokens=7, beam_width=4, length_penalty=-0.5)
REQUEST = Request("cmpl-1", [3, 1, 2], PARAMS, n=2, priority=-1, cache_domain="t")
BEAM_REQUEST = Request("cmpl-2", [3], BEAMS, n=4, tenant="team a", deadline_s=1.5)
RESUMED = Request(
    "cmpl-3", [3, 1], PARAMS, n=3, resumed=(ResumedBranch(2, (5, 6)), ResumedBranch(0))
)
LOGPROBS = [TokenLogprobs(7, -0.25, 2, (5, 7), (-0.125, -0.25))]


@pytest.mark.parametrize(
    "message",
    [
        Start({"model": None, "block_size": 16, "stop": ["a"], "f": 0.5, "b": True}),
        AddRequest(REQUEST),
        AddRequest(BEAM_REQUEST),
        AddRequest(RESUMED),
        AddRequest(replace(REQUEST, adapter=REF)),
        AddRequest(replace(REQUEST, prediction_token_ids=(5, 4095, 0))),
        FindAdapter(3, "sql", "/adapters/sql", anew=True),
        AbortRequest("cmpl-1"),
        AbortRequest("cmpl-1", 3),
        Ping(),
        GetStats(),
        GetMemory(),
        GetBlocks(3, 100),
        SetPaused(True),
        ClearPrefixes(),
        Shutdown(drain=True),
    ],
)
def test_messages_to_the_engine_come_out_as_they_went_in(message):
    assert decode_to_engine(encode(message)[4:]) == message


@pytest.mark.parametrize(
    "message",
    [
        Ready(ModelLimits(100, 512, (0, 1), SamplingDefaults(temperature=0.7), max_logprobs=5)),
        Ready(
            ModelLimits(100, 512), {"kernels": "avx2", "num_blocks": 2**40, "quantization": None}
        ),
        Progress("loading the weights", 2**33, 2**34),
        Pong(),
        Outputs([]),
        Outputs(
            [
                SequenceOutput("a", 0, [7], 3, None, None, LOGPROBS, LOGPROBS, None),
                SequenceOutput("b", 1, [7, 8], 0, FinishReason.STOP, 8),
                SequenceOutput("c", 0, [], finish_reason=FinishReason.ERROR, error="NaN"),
                SequenceOutput("d", 2, [7], 0, FinishReason.LENGTH, cumulative_logprob=-3.25),
            ]
        ),
        RequestFailed("a", "invalid_request", "no", 400, "prompt"),
        AdapterReply(3, REF),
        AdapterReply(4, failure=RequestFailed("", "adapter_error", "it is gone", 400)),
        StatsReply({"num_running": 3}),
        MemoryReply({"useful_bytes": 2**40, "useful_share": None, "tenants": {"": {"a": 0.5}}}),
        BlocksReply({"sequences": [["a", 0]], "blocks": [{"owners": [0], "fill": None}]}),
        Fatal("checkpoint_error", "no such folder"),
    ],
)
def test_messages_to_the_server_are_decoded_as_encoded(message):
    assert decode_to_server(encode(message)[4:]) == message


def test_outputs_come_out_as_the_types_of_the_core():
    output = SequenceOutput("b", 1, [7], 0, FinishReason.LENGTH, None, LOGPROBS)
    (back,) = decode_to_server(encode(Outputs([output]))[4:]).outputs
    assert isinstance(back, SequenceOutput)
    assert back.finish_reason is FinishReason.LENGTH
    assert isinstance(back.logprobs[0], TokenLogprobs)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x92\xa3add",
        encode(GetStats())[4:] + b"\x00",
        pickle.dumps(AbortRequest("a")),
        msgspec.msgpack.encode(["add", {"request_id": 3}]),
        msgspec.msgpack.encode(["unheard-of"]),
        msgspec.msgpack.encode(["abort", b"\xff\xfe", None]),
        b"\x93\xa5abort\xa2\xff\xfe\xc0",
    ],
)
def test_bytes_that_are_no_message_are_refused_with_a_sentence(body):
    with pytest.raises(MessageError, match="not a message from the API server"):
        decode_to_engine(body)
    with pytest.raises(MessageError, match="not a message from the engine"):
        decode_to_server(body)


def test_each_side_refuses_the_other_sides_messages():
    with pytest.raises(MessageError, match="Invalid value 'ready'"):
        decode_to_engine(encode(Ready(ModelLimits(1, 1)))[4:])
    with pytest.raises(MessageError, match="Invalid value 'shutdown'"):
        decode_to_server(encode(Shutdown(True))[4:])


def test_values_that_msgpack_cannot_carry_are_refused_when_sent():
    with pytest.raises(MessageError, match="Start can't be sent"):
        encode(Start({"model": object()}))
    with pytest.raises(MessageError, match="Start can't be sent"):
        encode(Start({"seed": 2**70}))


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidRequestError("no", "prompt"),
        errors.PromptTooLongError("too long", "prompt"),
        errors.RequestNeverFitsError("never fits"),
        errors.OverloadedError("full", 2.5),
        errors.EngineDeadError("gone"),
        errors.StepFailedError("NaN"),
    ],
)
def test_an_error_survives_the_wire_with_its_class_and_fields(error):
    message = decode_to_server(encode(request_failed("a", error))[4:])
    back = error_from(message)
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert (back.code, back.http_status) == (error.code, error.http_status)
    assert getattr(back, "param", None) == getattr(error, "param", None)
    assert getattr(back, "retry_after_s", None) == getattr(error, "retry_after_s", None)


def test_an_error_code_of_another_version_is_still_an_error():
    assert type(error_from(RequestFailed("a", "unheard-of", "no", 500))) is errors.QuireError


def test_a_fatal_message_is_a_configuration_error_only_where_it_says_so():
    built = start_error_from(Fatal("insufficient_memory", "need 3 GiB"))
    assert type(built) is errors.InsufficientMemoryError
    assert str(built) == "need 3 GiB"
    assert type(start_error_from(Fatal("internal_error", "boom"))) is errors.EngineDeadError


def test_a_resumed_request_comes_out_as_the_types_of_the_core():
    back = decode_to_engine(encode(AddRequest(RESUMED))[4:]).request
    assert isinstance(back.resumed[0], ResumedBranch)
    assert back.resumed[0].token_ids == (5, 6)
    assert {back.resumed[0].token_ids: 1}, "hashable: equal ones are found by it"
