"""Structured extraction: an answer that obeys a JSON schema, whatever the model.

python examples/extraction.py ["print(len(names), file=sys.stderr)"]
"""

import sys

from pydantic import BaseModel, ConfigDict, Field

from quire import LLM, SamplingParams, StructuredOutputsParams


class Call(BaseModel):
    """A call of a function, in a line of Python."""

    model_config = ConfigDict(extra="forbid")  # no other properties

    function: str = Field(pattern="^[a-z_.]{1,24}$")
    num_arguments: int = Field(ge=0, le=9)
    is_method: bool


def main() -> None:
    """Extract from one line, and read the answer as what it is."""
    line = (sys.argv[1:] or ["print(len(names), file=sys.stderr)"])[0]
    wanted = StructuredOutputsParams(json=Call.model_json_schema(), disable_any_whitespace=True)
    llm = LLM(dtype="float32", max_num_seqs=4, max_model_len=512)
    question = [{"role": "user", "content": f"Which function does this line call? {line}"}]
    params = SamplingParams(temperature=0.0, max_tokens=128, structured_outputs=wanted)
    answer = llm.chat(question, params)[0].outputs[0].text
    print(answer)
    print(repr(Call.model_validate_json(answer)))


if __name__ == "__main__":
    main()
