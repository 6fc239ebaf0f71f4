"""Each form of vLLM's calls with media is served, or refused in a sentence that names it."""

from pathlib import Path

from benchmarks.images.vllm_forms import EXAMPLES, FORMS, SERVED, outcomes

REFUSALS = {
    "uuids without images": "names 1 images, but multi_modal_data has 0",
    "image embeddings": "has the type dict",
    "video": "has a video, but this model takes images only",
    "audio": "'audio'",
    "vision chunk": "'vision_chunk'",
    "encoder prompt": "'decoder_prompt'",
    "kwargs of other media": "mm_processor_kwargs is {'fps': 1}, but fps is no setting",
    "chat with https:": "scheme https",
    "embed": "takes text only",
    "graphs of the encoder": "compilation_config",
    "the encoder's ranks": "mm_encoder_tp_mode",
    "Mistral's format": "tokenizer_mode",
    "assets": "quire.assets",
    "vllm.multimodal": "quire.multimodal",
}


def test_each_form_is_served_or_refused_by_name(tmp_path: Path) -> None:
    found = outcomes(tmp_path)
    assert {form for form, said in found.items() if said != SERVED} == set(REFUSALS)
    for form, name in REFUSALS.items():
        assert name in found[form], (form, found[form])
    assert {form for forms in EXAMPLES.values() for form in forms} <= set(FORMS)
