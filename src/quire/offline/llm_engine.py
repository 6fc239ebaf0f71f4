"""An engine that its caller steps: add_request, step, abort_request.

engine = LLMEngine(max_num_seqs=8)
engine.add_request("0", "import os", SamplingParams(max_tokens=32))
while engine.has_unfinished_requests():
    for output in engine.step():
        print(output.request_id, output.outputs[0].text)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from quire.core.adapters import LoRARequest
from quire.core.sampling_params import SamplingParams
from quire.engine_client.inputs import read_prompt, with_adapters
from quire.engine_client.outputs import OutputSnapshots
from quire.engine_client.results import RequestOutput
from quire.errors import InvalidRequestError
from quire.offline.local_engine import LocalEngine
from quire.offline.request_group import RequestGroup
from quire.option_fields import takes_arguments_of
from quire.options.engine_options import EngineOptions


@dataclass(slots=True)
class _Open:
    group: RequestGroup
    snapshots: OutputSnapshots


class LLMEngine(LocalEngine):
    """A model, its KV cache and an engine that computes while `step` is called."""

    @takes_arguments_of(EngineOptions)
    def __init__(self, model: str | None = None, **options: Any) -> None:
        """Load a model; arguments and errors are those of `LLM`."""
        super().__init__(EngineOptions.from_mapping({**options, "model": model}))
        self._open: dict[str, _Open] = {}

    @classmethod
    def from_engine_args(cls, engine_args: EngineOptions) -> Self:
        """An engine with the options of `EngineArgs`."""
        return cls(**engine_args.as_mapping())

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> None:
        """Add a request, with a prompt and an adapter like those of `LLM.generate`.

        Raises InvalidRequestError.
        """
        if request_id in self._open:
            raise InvalidRequestError(f"request id {request_id!r:.80} is in use", "request_id")
        own = SamplingParams() if params is None else params
        given = with_adapters([read_prompt(prompt)], lora_request)
        group = self._requests.prepare(given, [own])
        self._requests.open(group)
        snapshots = OutputSnapshots(group.assemblers[0], own.output_kind, request_id)
        self._open[request_id] = _Open(group, snapshots)

    def abort_request(self, request_ids: str | Sequence[str]) -> None:
        """Abort requests. Unknown and ended requests are ignored."""
        for name in [request_ids] if isinstance(request_ids, str) else request_ids:
            if name in self._open:
                self._requests.close(self._open.pop(name).group)

    def step(self) -> list[RequestOutput]:
        """Step the engine once for all requests.

        Returns an output for each request with new results; its params' output_kind says which
        tokens it has.
        """
        self._requests.advance()
        outputs: list[RequestOutput] = []
        for name, each in list(self._open.items()):
            found = each.snapshots.pop_output()
            if found is not None:
                outputs.append(found)
            if not each.group.unfinished:
                self._requests.close(self._open.pop(name).group)
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Whether a request has not ended."""
        return bool(self._open)

    def get_num_unfinished_requests(self) -> int:
        """The number of requests that have not ended."""
        return len(self._open)
