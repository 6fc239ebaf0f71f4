"""GET /tokenizer_info: the fields of the model's own file."""

import json

from quire.hub.model_folder import EMBEDDED_MODEL


def test_tokenizer_info_equals_the_config_file(http):
    answer = http.get("/tokenizer_info")
    assert answer.status_code == 200
    assert answer.json() == json.loads((EMBEDDED_MODEL / "tokenizer_config.json").read_text())
