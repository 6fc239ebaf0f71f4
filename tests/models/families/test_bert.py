"""BERT's input embeddings against transformers; `tests/offline/test_pooling.py` has the rest."""

import torch
from tests.pooling_folders import make_bert
from transformers import AutoModel

from quire.kernels.attention_inputs import AttentionInputs
from quire.models.checkpoints.loader import load_model
from quire.models.interface import InputEmbeds
from quire.models.registry import load_config


def attend_to_all(layer: int, inputs: AttentionInputs) -> torch.Tensor:
    """Over all tokens of the step."""
    heads = [part.transpose(0, 1) for part in (inputs.q, inputs.k, inputs.v)]
    return torch.nn.functional.scaled_dot_product_attention(*heads).transpose(0, 1)


def test_input_embeds_take_the_place_of_words(tmp_path) -> None:
    make_bert(tmp_path)
    config = load_config(tmp_path, pools_hidden=True)
    where = {"dtype": torch.float32, "device": torch.device("cpu"), "max_model_len": 32}
    model = load_model(tmp_path, config, **where)
    reference = AutoModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    token_ids, positions, places = torch.arange(5, 14), torch.arange(9), torch.tensor([1, 4, 8])
    with torch.inference_mode():
        inputs = reference.get_input_embeddings()(token_ids)
        inputs[places] = torch.randn(3, inputs.shape[1], generator=torch.manual_seed(1))
        expected = reference(inputs_embeds=inputs[None]).last_hidden_state[0]
        rows = InputEmbeds(places, inputs[places])
        found = model(token_ids, positions, attend_to_all, input_embeds=rows)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
