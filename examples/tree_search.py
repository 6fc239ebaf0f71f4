"""Tree search by forks: keep the likeliest branches of a text, and stop at one that passes a test.

Branches share the KV memory of all that they have in common; a fork copies no prompt and computes
nothing again. Here the test is whether a function parses as Python and uses its arguments.

    python examples/tree_search.py ["def join(path, name):"]
"""

import ast
import sys

from quire import LLM, SamplingParams
from quire.offline.branch_handle import BranchHandle

WIDTH = 16
KEPT = 4
TOKENS_A_ROUND = 3
MAX_TOKENS = 32


def solved(text: str) -> str | None:
    """The function in the text, if its first statement returns something of all its arguments."""
    code = "\n".join(text.splitlines()[:2])
    try:
        function = ast.parse(code).body[0]
    except SyntaxError:
        return None
    assert isinstance(function, ast.FunctionDef)
    used = {node.id for node in ast.walk(function.body[0]) if isinstance(node, ast.Name)}
    is_whole = text.count("\n") > 1  # else the line goes on
    return code if is_whole and used >= {arg.arg for arg in function.args.args} else None


def search(llm: LLM, prompt: str) -> tuple[str | None, int]:
    """The first function that is found, if any; and how many branches were tried."""
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=3, logprobs=0)
    branches = [llm.start(prompt, params)]
    num_tried = 1
    try:
        while branches:
            for _ in range(TOKENS_A_ROUND):
                branches[0].step()  # a step of the engine brings all branches on
            for branch in branches:
                if function := solved(prompt + branch.output.text):
                    return function, num_tried
            branches = hopeful(branches)
            children = [branch.fork() for branch in branches for _ in range(WIDTH // KEPT - 1)]
            branches += children
            num_tried += len(children)
        return None, num_tried
    finally:
        for branch in branches:
            branch.close()


def hopeful(branches: list[BranchHandle]) -> list[BranchHandle]:
    """The likeliest ones whose line goes on; the others are closed, and their memory is free."""
    going_on = [each for each in branches if each.output.finish_reason is None]
    going_on = [each for each in going_on if "\n" not in each.output.text]
    going_on.sort(key=lambda branch: branch.output.cumulative_logprob or 0.0, reverse=True)
    kept = going_on[:KEPT]
    for branch in branches:
        if branch not in kept:
            branch.close()
    return kept


def main() -> None:
    """Search one text with the embedded model."""
    prompt = (sys.argv[1:] or ["def join(path, name):"])[0] + "\n    return os.path"
    llm = LLM(dtype="float32", max_num_seqs=WIDTH, max_model_len=512)
    function, num_tried = search(llm, prompt)
    print(function or "# nothing found")
    print(f"# {num_tried} branches tried")


if __name__ == "__main__":
    main()
