"""The requests of one call of the offline API, and its prompts without requests.

Made by `request_preparer`, and run by `request_table`.
"""

from collections import deque
from dataclasses import dataclass, field

from quire.core.adapters import AdapterRef, LoRARequest
from quire.core.request import FinishReason, SequenceOutput
from quire.core.sampling_params import BeamSearchParams, SamplingParams
from quire.engine_client.inputs import PromptInput
from quire.engine_client.outputs import RequestAssembler
from quire.errors import AdapterError
from quire.images.reader import MAX_HELD_BYTES

Adapters = dict[LoRARequest, AdapterRef | AdapterError]
"""The adapter found for each LoRARequest, or the error if it can't be read."""


@dataclass(slots=True)
class RequestGroup:
    """The requests of one call, in the order of its prompts."""

    assemblers: list[RequestAssembler] = field(default_factory=list)
    #: Ids of the requests that have not ended.
    unfinished: set[str] = field(default_factory=set)
    #: Number of tokens that came since `RequestTable.wait` last returned.
    num_new_tokens: int = 0
    #: Number of requests that ended since `RequestTable.wait` last returned.
    num_ended: int = 0
    #: Error messages, by id, of requests that can't be computed; `RequestTable.open` ends these.
    failures: dict[str, str] = field(default_factory=dict)
    #: The prompts behind `assemblers`, with their params: their images are not read yet.
    rest: deque[tuple[PromptInput, SamplingParams]] = field(default_factory=deque)
    #: The parameters if the requests are beam searches.
    beams: BeamSearchParams | None = None
    adapters: Adapters = field(default_factory=dict)
    #: Bytes of the encoder's inputs of each unfinished request.
    image_bytes: dict[str, int] = field(default_factory=dict)
    #: The sum of image_bytes.
    num_image_bytes: int = 0

    @property
    def takes_more(self) -> bool:
        """Whether images of the next prompt may be read."""
        return bool(self.rest) and self.num_image_bytes < MAX_HELD_BYTES

    def add(self, assembler: RequestAssembler) -> None:
        """Append the request of the next prompt."""
        request = assembler.request
        self.assemblers.append(assembler)
        self.unfinished.add(request.request_id)
        num_bytes = sum(len(content.values) for content in request.contents)
        self.image_bytes[request.request_id] = num_bytes
        self.num_image_bytes += num_bytes

    def end(self, request_id: str) -> None:
        """Count a request that has ended."""
        self.unfinished.remove(request_id)
        self.num_image_bytes -= self.image_bytes.pop(request_id)
        self.num_ended += 1

    def fail(self, assembler: RequestAssembler, message: str) -> None:
        """End a request with an error before it was given to the engine."""
        request_id = assembler.request.request_id
        for index in range(assembler.request.n):
            reason = FinishReason.ERROR
            assembler.push(
                SequenceOutput(request_id, index, (), finish_reason=reason, error=message)
            )
        self.end(request_id)
