"""Reading a config strictly: what is read, what is harmless, what is refused and how."""

import pytest

from quire.errors import CheckpointError, UnsupportedModelError
from quire.models.config_fields import HARMLESS_FIELDS, ConfigFields


def test_read_and_harmless_fields_pass():
    raw = dict.fromkeys(HARMLESS_FIELDS, "anything") | {
        "vocab_size": 7,
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        "some_other_token_id": 4,
        "pretraining_tp": 1,
        "rope_interleaved": False,
        "not_set": None,
    }
    fields = ConfigFields(raw)
    assert fields.integer("vocab_size") == 7
    fields.finish()


def test_an_unknown_field_is_refused_with_its_value_and_what_is_understood():
    fields = ConfigFields({"vocab_size": 7, "logit_scale": 0.5})
    fields.integer("vocab_size")
    fields.optional_integer("head_dim")
    with pytest.raises(UnsupportedModelError) as caught:
        fields.finish()
    message = str(caught.value)
    assert "the field logit_scale is 0.5" in message
    assert "vocab_size" in message and "head_dim" in message  # understood
    assert "transformers_version" not in message  # a wall of harmless names helps nobody
    assert len(message) < 900
    assert "by --hf-overrides '{\"logit_scale\": null}'" in message


NOTES = {
    "_flash_attn_2_enabled": True,
    "my note": 1,
    "my_note": "trained on Tuesday",
    "training_dtype": "bf16",
    "use_lora": {"r": 8},
}


def test_fields_that_no_model_reads_are_left_out_and_named():
    raw = {"transformers_version": "4.40.0.dev0", "gone": None} | NOTES
    assert ConfigFields(raw).finish() == tuple(NOTES)


@pytest.mark.parametrize(
    "field", ["attention_bias", "clip_qkv", "logit_scale", "rope_theta", "use_bias"]
)
def test_fields_that_another_family_reads_are_refused(field):
    with pytest.raises(UnsupportedModelError, match="some class of transformers reads a field"):
        ConfigFields({field: "a text"}).finish()


@pytest.mark.parametrize(
    ("origin", "reason"),
    [
        ({"transformers_version": "6.0.0"}, "was written by transformers 6.0.0"),
        ({"transformers_version": "5.999.1.dev0"}, "was written by transformers 5.999.1.dev0"),
        ({"auto_map": {"AutoConfig": "my.py"}}, r"code in the model's own folder \(auto_map\)"),
    ],
)
def test_a_field_of_code_that_is_not_known_is_refused(origin, reason):
    with pytest.raises(UnsupportedModelError, match=reason):
        ConfigFields(origin | {"my_note": 1}).finish()
    assert ConfigFields(origin | {"_my_note": 1}).finish() == ("_my_note",)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pretraining_tp", 2),
        ("is_encoder_decoder", True),
        ("partial_rotary_factor", 0.5),
        ("rope_interleaved", True),
        ("use_mrope", True),
    ],
)
def test_fields_with_one_plain_value_are_refused_at_others(name, value):
    with pytest.raises(UnsupportedModelError, match=f"{name} is {value}, but only"):
        ConfigFields({name: value}).finish()


def test_attention_dropout_is_of_training_only():
    ConfigFields({"attention_dropout": 0.1}).finish()


@pytest.mark.parametrize("value", ["7", 7.0, True, 0, -1, [7], (1 << 24) + 1, 10**4000])
def test_invalid_counts_are_refused(value):
    with pytest.raises(CheckpointError, match=r"vocab_size is .* an integer from 1 to 16777216"):
        ConfigFields({"vocab_size": value}).integer("vocab_size", 3)


@pytest.mark.parametrize("raw", [{}, {"vocab_size": None}])
def test_a_count_without_default_must_be_there(raw):
    with pytest.raises(CheckpointError, match=r"config.json has no vocab_size"):
        ConfigFields(raw).integer("vocab_size")
    assert ConfigFields(raw).integer("vocab_size", 3) == 3
    assert ConfigFields(raw).optional_integer("vocab_size") is None


@pytest.mark.parametrize("value", ["1", 0, -1e-6, False, float("nan"), float("inf"), 1.5, 10**400])
def test_invalid_positive_numbers_are_refused(value):
    with pytest.raises(CheckpointError, match=r"rms_norm_eps is .* a number from 1e-30 to 1$"):
        ConfigFields({"rms_norm_eps": value}).number("rms_norm_eps", 1e-6)


def test_numbers_and_flags_have_defaults():
    fields = ConfigFields({"rms_norm_eps": 1, "bias": True, "null": None, "factor": None})
    assert fields.number("rms_norm_eps", 2.0) == 1.0
    assert fields.number("factor", 2.0) == 2.0
    assert fields.flag("bias", False) is True
    assert fields.flag("null", True) is True
    assert fields.flag("absent", False) is False


@pytest.mark.parametrize("value", ["true", 1, 0])
def test_invalid_flags_are_refused(value):
    with pytest.raises(CheckpointError, match=r"mlp_bias is .* true or false"):
        ConfigFields({"mlp_bias": value}).flag("mlp_bias", False)


def test_a_choice_is_refused_with_the_list():
    fields = ConfigFields({"hidden_act": "gelu"})
    with pytest.raises(UnsupportedModelError, match="hidden_act is 'gelu', but only silu"):
        fields.choice("hidden_act", "silu", ("silu",))
    assert fields.choice("absent", "silu", ("silu",)) == "silu"
