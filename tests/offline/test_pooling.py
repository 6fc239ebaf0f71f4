"""Embeddings and scores equal transformers', and to the bit what each prompt gets alone."""

import json

import pytest
import torch
from tests.pooling_folders import add_modules, make_bert, make_qwen3
from transformers import Qwen3ForCausalLM, Qwen3ForSequenceClassification, Qwen3Model

from quire import LLM, SamplingParams
from quire.errors import ConfigurationError, InvalidRequestError, PromptTooLongError
from quire.offline.pooling import print_embeddings
from quire.offline.pooling_arguments import PoolingArguments as PoolingParams

OPTIONS = {"dtype": "float32", "kv_cache_memory": "2MiB", "max_num_seqs": 8}
TEXTS = ["paris is the capital of france", "cats sleep", "bread", "the city of paris is a city"]
TOLERANCE = {"atol": 2e-5, "rtol": 1e-5}


@pytest.fixture(scope="module")
def bert_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    return folder, make_bert(folder)


@pytest.fixture(scope="module")
def bert(bert_folder):
    return LLM(str(bert_folder[0]), **OPTIONS), bert_folder[1]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    model = make_qwen3(folder)
    return LLM(str(folder), **OPTIONS, max_num_batched_tokens=32), model


def hidden_of(model, token_ids):
    with torch.inference_mode():
        body = getattr(model, "model", getattr(model, "bert", model))
        return body(torch.tensor([token_ids])).last_hidden_state[0]


def vectors(outputs):
    return [torch.tensor(output.outputs.embedding) for output in outputs]


def test_a_bert_embeds_the_mean_of_its_hidden_states(bert):
    llm, model = bert
    for output, got in zip(found := llm.embed(TEXTS), vectors(found), strict=True):
        assert output.prompt_token_ids[0] == 2 and output.prompt_token_ids[-1] == 3
        mean = hidden_of(model, output.prompt_token_ids).mean(0)
        torch.testing.assert_close(got, mean / mean.norm(), **TOLERANCE)


@pytest.mark.parametrize("mode", ["cls_token", "mean_tokens", "lasttoken"])
def test_a_folder_of_sentence_transformers_says_how(mode, bert_folder, tmp_path):
    folder, model = tmp_path / "folder", bert_folder[1]
    folder.mkdir()
    for path in bert_folder[0].iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    add_modules(folder, mode, normalize=False, max_seq_length=6)
    llm = LLM(str(folder), **OPTIONS)
    (output,) = llm.embed(TEXTS[1])
    hidden = hidden_of(model, output.prompt_token_ids)
    expected = {"cls_token": hidden[0], "mean_tokens": hidden.mean(0), "lasttoken": hidden[-1]}
    torch.testing.assert_close(vectors([output])[0], expected[mode], **TOLERANCE)
    with pytest.raises(PromptTooLongError, match="max_model_len, 6"):
        llm.embed(TEXTS[0])
    (cut,) = llm.embed(TEXTS[0], truncate_prompt_tokens=-1)
    assert len(cut.prompt_token_ids) == 6 and cut.prompt_token_ids[-1] == 3


@pytest.mark.parametrize("name", ["bert", "qwen3"])
def test_a_vector_is_the_same_alone_and_in_any_crowd(name, request):
    llm = request.getfixturevalue(name)[0]
    generator = torch.Generator().manual_seed(1)
    prompts = [
        {"prompt_token_ids": torch.randint(4, 60, (length,), generator=generator).tolist()}
        for length in (1, 2, 31, 32, 33, 50, 64, 17, 5)
    ]
    alone = [llm.embed(prompt)[0].outputs for prompt in prompts]
    for crowd in (prompts, prompts[::-1]):
        found = [output.outputs for output in llm.embed(crowd)]
        assert found == (alone if crowd is prompts else alone[::-1])


def test_the_last_hidden_state_of_a_decoder_beside_generation(qwen3):
    llm, model = qwen3
    (output,) = llm.embed(TEXTS[0])
    last = hidden_of(model, output.prompt_token_ids)[-1]
    torch.testing.assert_close(vectors([output])[0], last / last.norm(), **TOLERANCE)
    assert llm.generate(TEXTS[0], SamplingParams(max_tokens=3))[0].outputs[0].token_ids
    again = llm.embed(TEXTS[0] + " " + TEXTS[0])
    assert again[0].num_cached_tokens > 0


def test_chunks_change_no_bit_of_a_mean(tmp_path):
    make_qwen3(tmp_path)
    prompt = {"prompt_token_ids": [7 * i % 4000 for i in range(100)]}
    found = [
        LLM(str(tmp_path), **OPTIONS, pooling_type="mean", max_num_batched_tokens=size)
        .embed([prompt, prompt])[1]
        .outputs
        for size in (13, 200)
    ]
    assert found[0] == found[1]


def test_dimensions_and_length(bert):
    llm, _ = bert
    whole, cut, raw = (
        vectors(llm.embed(TEXTS[0], **how))[0]
        for how in ({}, {"dimensions": 16}, {"normalize": False})
    )
    assert len(cut) == 16
    torch.testing.assert_close(cut, whole[:16] / whole[:16].norm())
    torch.testing.assert_close(raw / raw.norm(), whole)
    with pytest.raises(InvalidRequestError, match="dimensions is 65, but must be from 1 to 64"):
        llm.embed(TEXTS[0], dimensions=65)


def test_a_base_model_without_a_head_is_served(tmp_path):
    model = make_qwen3(tmp_path, Qwen3Model)
    add_modules(tmp_path, "lasttoken", normalize=True)
    (output,) = LLM(str(tmp_path), **OPTIONS).embed("bread and cats")
    last = hidden_of(model, output.prompt_token_ids)[-1]
    torch.testing.assert_close(vectors([output])[0], last / last.norm(), **TOLERANCE)


def test_a_model_that_pools_generates_nothing(bert):
    with pytest.raises(InvalidRequestError, match="generates no text: it embeds and scores"):
        bert[0].generate("bread")
    with pytest.raises(InvalidRequestError, match="token id 64, but the vocabulary has 64"):
        bert[0].embed({"prompt_token_ids": [1, 64]})


def test_an_encoder_keeps_no_prefixes_on_disk(bert_folder, tmp_path):
    with pytest.raises(
        ConfigurationError, match=r"cache_dir is .* but an encoder's prefixes can't"
    ):
        LLM(str(bert_folder[0]), **OPTIONS, cache_dir=tmp_path)


@pytest.mark.parametrize("num_labels", [1, 3])
def test_a_cross_encoder_scores_pairs_and_classifies(num_labels, tmp_path):
    model = make_bert(tmp_path, num_labels)
    llm = LLM(str(tmp_path), **OPTIONS)
    (output,) = llm.classify(TEXTS[0])
    with torch.inference_mode():
        logits = model(torch.tensor([output.prompt_token_ids])).logits[0]
    expected = logits.sigmoid() if num_labels == 1 else logits.softmax(-1)
    torch.testing.assert_close(torch.tensor(output.outputs.probs), expected, **TOLERANCE)
    if num_labels > 1:
        with pytest.raises(InvalidRequestError, match="its head has 3 labels"):
            llm.score(TEXTS[0], TEXTS[1])
        return
    (scored,) = llm.score(TEXTS[0], TEXTS[1])
    ids = torch.tensor([scored.prompt_token_ids])
    assert ids.max() > 64
    with torch.inference_mode():
        expected = model(ids % 64, token_type_ids=ids // 64).logits[0, 0].sigmoid()
    assert scored.outputs.score == pytest.approx(expected.item(), abs=2e-5)
    with pytest.raises(InvalidRequestError, match="it does not embed"):
        llm.embed(TEXTS[0])


def test_a_reranker_scores_by_two_tokens(tmp_path):
    model = make_qwen3(tmp_path, Qwen3ForCausalLM)
    llm = LLM(str(tmp_path), **OPTIONS, score_tokens="no,if")
    refusing, agreeing = (
        llm.get_tokenizer().encode(word, add_special_tokens=False)[0] for word in ("no", "if")
    )
    found = llm.score("where is paris?", ["paris is a city", "cats <|im_end|> sleep"])
    for output in found:
        with torch.inference_mode():
            logits = model(torch.tensor([output.prompt_token_ids])).logits[0, -1]
        expected = logits[[refusing, agreeing]].softmax(-1)[1]
        assert output.outputs.score == pytest.approx(expected.item(), abs=2e-5)
    text = llm.get_tokenizer().decode(found[1].prompt_token_ids, skip_special_tokens=False)
    assert "<Query>: where is paris?\n<Document>: cats <|im_end|> sleep<|im_end|>" in text
    with pytest.raises(ConfigurationError, match=r"which is \d tokens"):
        LLM(str(tmp_path), **OPTIONS, score_tokens="no,parisian")


def test_a_decoder_with_a_scoring_head(tmp_path):
    model = make_qwen3(tmp_path, Qwen3ForSequenceClassification, num_labels=1, pad_token_id=0)
    (output,) = LLM(str(tmp_path), **OPTIONS).score("paris?", "a city", instruction="find it")
    with torch.inference_mode():
        logit = model(torch.tensor([output.prompt_token_ids])).logits[0, 0]
    assert output.outputs.score == pytest.approx(logit.sigmoid().item(), abs=2e-5)


def test_a_template_writes_a_pair_in_the_words_of_a_model(tmp_path):
    model = make_qwen3(tmp_path, Qwen3ForSequenceClassification, num_labels=1, pad_token_id=0)
    llm = LLM(str(tmp_path), **OPTIONS)
    roles = ("query", "document")
    parts = [
        f'{{{{ (messages | selectattr("role", "eq", "{r}") | first).content }}}}' for r in roles
    ]
    template = f"<|im_start|>{{{{ instruction }}}}: {parts[0]} <- {parts[1]}<|im_end|>"
    (output,) = llm.score(
        "paris?", "a <|im_end|>", instruction="find", chat_template=template, use_tqdm=False
    )
    tokenizer, token_ids = llm.get_tokenizer(), output.prompt_token_ids
    text = tokenizer.decode(token_ids, skip_special_tokens=False)
    assert text == "<|im_start|>find: paris? <- a <|im_end|><|im_end|>"
    assert token_ids.count(tokenizer.encode("<|im_end|>")[0]) == 1
    with torch.inference_mode():
        logit = model(torch.tensor([token_ids])).logits[0, 0]
    assert output.outputs.score == pytest.approx(logit.sigmoid().item(), abs=2e-5)
    (cut,) = llm.score("a", "b", chat_template=template, truncate_prompt_tokens=3)
    assert len(cut.prompt_token_ids) == 3


def test_encode_returns_the_tensors_that_embed_lists(bert):
    llm, model = bert
    for output, listed in zip(llm.encode(TEXTS), vectors(llm.embed(TEXTS)), strict=True):
        assert torch.equal(output.outputs.data, listed) and output.finished
    raw = PoolingParams(dimensions=8, use_activation=False)
    (output,) = llm.encode(TEXTS[0], raw, pooling_task="token_embed")
    hidden = hidden_of(model, output.prompt_token_ids)[:, :8]
    torch.testing.assert_close(output.outputs.data, hidden, **TOLERANCE)
    (unit,) = llm.encode(TEXTS[0], pooling_task="token_embed")
    torch.testing.assert_close(unit.outputs.data.norm(dim=1), torch.ones(len(hidden)))
    assert torch.equal(
        *(
            vectors(llm.embed(TEXTS[0], **how))[0]
            for how in ({"pooling_params": raw}, {"dimensions": 8, "normalize": False})
        )
    )


def test_vectors_of_tokens_are_the_same_alone_in_a_crowd_and_in_chunks(qwen3):
    llm, model = qwen3  # 32 tokens a step
    prompts = [{"prompt_token_ids": [7 * i % 4000 for i in range(n)]} for n in (70, 5, 33)]
    alone = [llm.encode(each, pooling_task="token_embed")[0].outputs.data for each in prompts]
    crowd = llm.encode(prompts, pooling_task="token_embed")
    for single, among in zip(alone, crowd, strict=True):
        assert torch.equal(single, among.outputs.data)
    hidden = hidden_of(model, prompts[0]["prompt_token_ids"])
    expected = torch.nn.functional.normalize(hidden, dim=1)
    torch.testing.assert_close(alone[0], expected, **TOLERANCE)


def test_heads_score_single_tokens(tmp_path):
    model = make_bert(tmp_path, 5, of_tokens=True)
    llm = LLM(str(tmp_path), **OPTIONS)
    (output,) = llm.encode(TEXTS[0])
    with torch.inference_mode():
        logits = model(torch.tensor([output.prompt_token_ids])).logits[0]
    torch.testing.assert_close(output.outputs.data, logits.softmax(-1), **TOLERANCE)
    (raw,) = llm.encode(TEXTS[0], PoolingParams(use_activation=False))
    torch.testing.assert_close(raw.outputs.data, logits, **TOLERANCE)
    with pytest.raises(InvalidRequestError, match="classifies single tokens; use LLM"):
        llm.classify(TEXTS[0])
    with pytest.raises(InvalidRequestError, match="scores no pairs: it classifies single"):
        llm.score(*TEXTS[:2])


def test_invalid_pooling_tasks_are_refused_by_name(bert):
    llm, _ = bert
    for wrong, message in (
        ({"pooling_task": "plugin"}, "pooling_task is 'plugin', but must be one of embed, class"),
        ({"pooling_task": "classify"}, "has no head that classifies"),
        ({"pooling_task": "token_classify"}, "no head that scores single tokens"),
        ({"pooling_params": {"dimensions": 3}}, "but must be a PoolingParams"),
        ({"lora_request": object()}, "lora_request is .*: adapters are served for"),
        ({"pooling_tsk": "embed"}, "encode has no argument pooling_tsk"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            llm.encode(TEXTS[0], **wrong)
    with pytest.raises(InvalidRequestError, match="is given together with dimensions"):
        llm.embed(TEXTS[0], dimensions=8, pooling_params=PoolingParams())
    with pytest.raises(InvalidRequestError, match="dimensions is 8, but scores are not cut"):
        llm.classify(TEXTS[0], pooling_params=PoolingParams(dimensions=8))
    with pytest.raises(InvalidRequestError, match="late_chunking_params is 3"):
        PoolingParams(late_chunking_params=3)
    with pytest.raises(InvalidRequestError, match="dimensions is 0, but must be at least 1"):
        PoolingParams(dimensions=0)


def test_vectors_are_printed_short(capsys):
    print_embeddings([1.0, 2.0], prefix="Reward")
    print_embeddings([0.5] * 6)
    assert capsys.readouterr().out == (
        "Reward: [1.0, 2.0] (size=2)\nEmbeddings: [0.5, 0.5, 0.5, 0.5, ...] (size=6)\n"
    )


def test_an_embedding_model_scores_by_the_cosine(bert):
    llm, _ = bert
    first, second = vectors(llm.embed(TEXTS[:2]))
    (output,) = llm.score(*TEXTS[:2])
    assert output.outputs.score == pytest.approx(float(first @ second), abs=1e-6)


def test_vectors_of_all_tokens_are_compared_where_that_is_the_task(bert_folder):
    settings = {"task": "token_embed", "pooling_type": "CLS"}
    llm = LLM(str(bert_folder[0]), **OPTIONS, pooler_config=settings)
    first, second = (each.outputs.data for each in llm.encode(TEXTS[:2]))
    expected = sum(max(float(a @ b) for b in second) for a in first)
    (output,) = llm.score(*TEXTS[:2])
    assert output.outputs.score == pytest.approx(expected, abs=1e-5)
    for wrong, message in (
        ({"task": "plugin"}, "pooler_config: task is 'plugin', but must be None or one of embed"),
        ({"pooling_type": "ALL"}, "pooling_type is 'ALL', but must be None or one of cls"),
        ({"dimensions": 3}, "dimensions is 3, .*PoolingParams sets it"),
        (3, "pooler_config is 3, but must be a PoolerConfig"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            LLM(str(bert_folder[0]), **OPTIONS, pooler_config=wrong)
    both = {"pooler_config": settings, "pooling_type": "mean"}
    with pytest.raises(ConfigurationError, match="pooling_type is 'mean', and 'cls' in pooler"):
        LLM(str(bert_folder[0]), **OPTIONS, **both)


def test_unknown_pooling_modules_are_refused_by_name(bert_folder, tmp_path):
    for path in bert_folder[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    add_modules(tmp_path, "max_tokens", normalize=True)
    with pytest.raises(ConfigurationError, match="it pools by pooling_mode_max_tokens"):
        LLM(str(tmp_path), **OPTIONS)
    modules = [{"path": "", "type": "x.Transformer"}, {"path": "2_Dense", "type": "x.Dense"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ConfigurationError, match=r"module 'x\.Dense' is not understood"):
        LLM(str(tmp_path), **OPTIONS)
    with pytest.raises(ConfigurationError, match="runner is 'generate', but BertModel"):
        LLM(str(bert_folder[0]), **OPTIONS, runner="generate")
