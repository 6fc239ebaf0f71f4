"""EleutherAI's lm-evaluation-harness over HTTP: `local-completions`, `local-chat-completions`.

    python -m benchmarks.clients.all_clients --only evaluations

installs it, starts a server and runs this; `cases` says what a case is. Its tasks are written here,
one of each kind of request that the harness has.
"""

import json
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.clients.cases import case, main

SAMPLES = [
    {"text": "import os\nos.path", "choices": [".join", " dog"], "answer": 0},
    {"text": "def f(self", "choices": [" the", "):"], "answer": 1},
    {"text": "for i in", "choices": [" range", "}"], "answer": 0},
]
TASKS: dict[str, dict[str, Any]] = {
    "served_choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
    "served_texts": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match"}],
    },
    "served_perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
}


@contextmanager
def _tasks() -> Iterator[Path]:
    """A folder with the tasks and their samples; caches of data sets lie there, too."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ |= {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
        samples = folder / "samples.jsonl"
        samples.write_text("".join(f"{json.dumps(sample)}\n" for sample in SAMPLES))
        common = {
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(samples)}},
            "test_split": "test",
        }
        for task, fields in TASKS.items():
            # JSON is YAML.
            (folder / f"{task}.yaml").write_text(json.dumps({"task": task, **common, **fields}))
        yield folder


def _evaluate(kind: str, arguments: dict[str, Any], tasks: list[str], **options: Any) -> Any:
    """The results of each task."""
    with _tasks() as folder:
        import lm_eval
        from lm_eval.tasks import TaskManager

        found = lm_eval.simple_evaluate(
            model=kind,
            model_args=arguments,
            tasks=tasks,
            task_manager=TaskManager(include_path=str(folder), include_defaults=False),
            bootstrap_iters=0,
            **options,
        )
    return found["results"]


@case("lm_eval", "local-completions: choices, texts, perplexity")
def completions(url: str, model: str) -> None:
    for more in ({}, {"num_concurrent": 4, "batch_size": 2}, {"tokenizer_backend": "remote"}):
        arguments = {"model": model, "base_url": f"{url}/v1/completions", **more}
        found = _evaluate("local-completions", arguments, list(TASKS))
        assert found["served_choices"]["acc,none"] == 1.0
        assert 0 <= found["served_texts"]["exact_match,none"] <= 1
        perplexity = found["served_perplexity"]["word_perplexity,none"]
        assert math.isfinite(perplexity) and perplexity > 1


@case("lm_eval", "local-chat-completions: texts")
def chats(url: str, model: str) -> None:
    arguments = {"model": model, "base_url": f"{url}/v1/chat/completions"}
    found = _evaluate(
        "local-chat-completions", arguments, ["served_texts"], apply_chat_template=True
    )
    assert 0 <= found["served_texts"]["exact_match,none"] <= 1


if __name__ == "__main__":
    main()
