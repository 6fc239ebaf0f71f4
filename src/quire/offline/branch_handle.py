"""A handle of a running request: the caller steps, reads, branches and finishes it.

    with llm.start("Once upon a time", SamplingParams(max_tokens=64)) as story:
        for _ in range(20):
            print(story.step(), end="")
        other = story.fork(SamplingParams(max_tokens=64, temperature=1.5))
        print(story.finish().text, other.finish().text, sep="\n---\n")

A branch shares the KV blocks of the tokens that it has in common with its parent. A partly filled
block is copied when either branch first writes to it. Made by `LLM.start`.
"""

from collections.abc import Iterator

from quire.core.sampling_params import SamplingParams
from quire.engine_client.outputs import RequestAssembler
from quire.engine_client.results import CompletionOutput, RequestOutput
from quire.offline.request_table import RequestTable


class BranchHandle:
    """One branch of one request. Iterating steps the engine until this branch has new text.

    Each step of the engine advances all open requests of the LLM, so steps for other requests, from
    any thread, bring this branch's text, too. The branch holds memory until it ends or is closed.
    """

    def __init__(
        self,
        requests: RequestTable,
        assembler: RequestAssembler,
        branch_index: int,
        params: SamplingParams,
    ) -> None:
        self._requests = requests
        self._assembler = assembler
        self._branch_index = branch_index
        self._params = params

    @property
    def output(self) -> CompletionOutput:
        """The branch's output so far, including the tokens that it had when it was forked."""
        return self.request.outputs[self._branch_index]

    @property
    def request(self) -> RequestOutput:
        """The whole request: its prompt, and the outputs of all branches."""
        return self._requests.output(self._assembler)

    def __iter__(self) -> Iterator[str]:
        """The text as it comes, to the branch's end, without the text that a fork began with."""
        while text := self._requests.next_text(self._assembler, self._branch_index):
            yield text
        self.close()

    def step(self) -> str:
        """Step the engine once. Returns the branch's new text, which may be empty."""
        return self._requests.step(self._assembler, self._branch_index)

    def finish(self) -> CompletionOutput:
        """Run the branch to its end."""
        for _ in self:
            pass
        return self.output

    def fork(self, sampling_params: SamplingParams | None = None) -> "BranchHandle":
        """A new branch that continues from all tokens that this branch has now.

        If `sampling_params` is None, this branch's apply. Limits count from the prompt on, as if
        the branch had generated all its tokens: max_tokens and min_tokens include the tokens that
        it starts with, and penalties count them. Its random numbers differ from its parent's, by
        the index of the branch. Raises InvalidRequestError for a branch that has ended.
        """
        params = sampling_params or self._params
        index = self._requests.fork(self._assembler, self._branch_index, params)
        return BranchHandle(self._requests, self._assembler, index, params)

    def close(self) -> None:
        """Abort the branch if it has not ended. A second call does nothing."""
        self._requests.end_branch(self._assembler, self._branch_index)

    def __enter__(self) -> "BranchHandle":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
