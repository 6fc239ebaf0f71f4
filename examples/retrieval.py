"""Retrieval: find texts by embeddings, then rank the best of them by scores.

The embedded model is no embedding model, so it only shows how it goes; name one to see it work,
such as Qwen/Qwen3-Embedding-0.6B, and a reranker, such as cross-encoder/ms-marco-MiniLM-L6-v2.

    python examples/retrieval.py [EMBEDDING_MODEL [RERANKER]]
"""

import sys

from quire import LLM

DOCUMENTS = (
    "os.path.join puts the parts of a path together.",
    "json.dumps writes an object as JSON text.",
    "sorted returns a new list in ascending order.",
    "The quick brown fox jumps over the lazy dog.",
)
QUESTION = "How do I join a path?"
NUM_FOUND = 2


def main() -> None:
    """Embed the documents once, the question for itself, and score what was found."""
    models = [*sys.argv[1:], None, None]
    embedder = LLM(models[0], dtype="float32", max_num_seqs=4, max_model_len=512)
    vectors = [each.outputs.embedding for each in embedder.embed(list(DOCUMENTS))]
    query = embedder.embed(QUESTION)[0].outputs.embedding

    # Vectors have length 1, so the cosine is their product.
    nearness = [sum(a * b for a, b in zip(query, vector, strict=True)) for vector in vectors]
    ranking = sorted(range(len(DOCUMENTS)), key=nearness.__getitem__, reverse=True)
    found = [DOCUMENTS[index] for index in ranking[:NUM_FOUND]]

    reranker = embedder if models[1] is None else LLM(models[1], dtype="float32")
    scores = [each.outputs.score for each in reranker.score(QUESTION, found)]
    for score, document in sorted(zip(scores, found, strict=True), reverse=True):
        print(f"{score:7.4f}  {document}")


if __name__ == "__main__":
    main()
