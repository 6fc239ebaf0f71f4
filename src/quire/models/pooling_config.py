"""Reads a model folder's settings for embeddings and scores.

Folders of sentence-transformers list modules in modules.json. Embedding models have a transformer,
a pooling of its hidden states and maybe a normalisation. Rerankers may have a transformer that
predicts tokens, and two tokens ("no" and "yes") whose logits are compared. Unknown modules are
refused by name. GGUF files name a type of pooling. For other folders, the pooling depends on the
kind of model. Called by `assembly`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.core.pooling import Activation, ModelPooling, PoolingKind
from quire.errors import UnsupportedModelError, shown
from quire.hub.gguf.header import read_gguf
from quire.hub.gguf.naming import find_gguf
from quire.hub.model_files import read_json_list, read_json_object
from quire.models.checkpoints.gguf.gguf_files import GGUFFiles
from quire.models.checkpoints.readers import find_reader
from quire.models.config import TOKEN_CLASSIFIER_SUFFIX, ModelConfig
from quire.models.config_bounds import checked_integer

MODULES_FILE = "modules.json"
_KINDS = {
    "pooling_mode_cls_token": PoolingKind.CLS,
    "pooling_mode_lasttoken": PoolingKind.LAST,
    "pooling_mode_mean_tokens": PoolingKind.MEAN,
}
_ACTIVATIONS = {"Identity": Activation.NONE, "Sigmoid": Activation.SIGMOID}


@dataclass(frozen=True, slots=True)
class PoolingFolder:
    """The settings that a model folder's files declare."""

    #: The kind of pooling; None if the files name none.
    kind: PoolingKind | None = None
    normalize: bool = False
    #: The token ids for "no" and "yes"; empty if scores are not computed from logits.
    score_token_ids: tuple[int, ...] = ()
    #: The longest input in tokens; None if only the model limits it.
    max_tokens: int | None = None


_GGUF_KINDS = {1: PoolingKind.MEAN, 2: PoolingKind.CLS, 3: PoolingKind.LAST}


def read_pooling(folder: Path) -> PoolingFolder | None:
    """Read the pooling settings of a model folder or GGUF file; None if there are none.

    Raises CheckpointError and UnsupportedModelError for unsupported settings.
    """
    if has_modules(folder):
        return read_pooling_folder(folder)
    if find_reader(folder) is not GGUFFiles:
        return None
    path = find_gguf(folder)
    assert path is not None
    metadata = read_gguf(path).metadata
    said = metadata.get(f"{metadata.get('general.architecture')}.pooling_type")
    # Other values mean no pooling, or models that quire does not support.
    kind = _GGUF_KINDS.get(said) if isinstance(said, int) else None
    return None if kind is None else PoolingFolder(kind, normalize=True)


def has_modules(folder: Path) -> bool:
    """Whether the folder was saved by sentence-transformers."""
    return (folder / MODULES_FILE).is_file()


def read_pooling_folder(folder: Path) -> PoolingFolder:
    """Read a folder of sentence-transformers.

    Raises CheckpointError and UnsupportedModelError for unsupported settings.
    """
    path = folder / MODULES_FILE
    kind: PoolingKind | None = None
    normalize = False
    score_token_ids: tuple[int, ...] = ()
    for module in read_json_list(path):
        name = str(module.get("type", "")).rpartition(".")[2]
        inner = folder / Path(str(module.get("path", ""))).name
        if name == "Pooling":
            kind = _read_kind(inner / "config.json")
        elif name == "Normalize":
            normalize = True
        elif name == "LogitScore":
            score_token_ids = _read_score_tokens(inner / "config.json")
        elif name != "Transformer":
            raise UnsupportedModelError(
                f"{path}: the module {shown(module.get('type'))} is not understood; there may be"
                " Transformer, Pooling, Normalize and LogitScore"
            )
    return PoolingFolder(kind, normalize, score_token_ids, _read_max_tokens(folder))


def model_pooling(
    config: ModelConfig,
    said: PoolingFolder | None,
    raw: Mapping[str, Any],
    pooling_type: str | None = None,
) -> ModelPooling:
    """The pooling of the model that `config` describes.

    `said` are the settings in the model's files, or None. `raw` are the fields of config.json.
    `pooling_type` is the user's option, which takes precedence.
    """
    usual = PoolingKind.LAST if config.is_causal else PoolingKind.MEAN
    if config.num_labels:
        usual = PoolingKind.LAST if config.is_causal else PoolingKind.CLS
    kind = usual if said is None or said.kind is None else said.kind
    token_ids = () if said is None else said.score_token_ids
    scores_tokens = config.architecture.endswith(TOKEN_CLASSIFIER_SUFFIX)
    return ModelPooling(
        kind=kind if pooling_type is None else PoolingKind(pooling_type),
        normalize=said is None or said.kind is None or said.normalize,
        in_one_step=not config.is_causal,
        num_dimensions=config.hidden_size,
        num_scores=config.num_labels,
        score_token_ids=token_ids,
        activation=Activation.SOFTMAX if token_ids else _read_activation(config, raw),
        scores_tokens=scores_tokens,
    )


def _read_kind(path: Path) -> PoolingKind:
    fields = read_json_object(path)
    chosen = [name for name, value in fields.items() if name.startswith("pooling_mode_") and value]
    # Some versions write a single name, such as "mean", instead of a flag for each kind.
    if "pooling_mode" in fields and not chosen:
        chosen = [
            name
            for name in _KINDS
            if name.removeprefix("pooling_mode_").split("_")[0] == str(fields["pooling_mode"])
        ]
    if len(chosen) != 1 or chosen[0] not in _KINDS or fields.get("include_prompt") is False:
        raise UnsupportedModelError(
            f"{path}: it pools by {', '.join(chosen) or 'nothing'}; understood is one of"
            f" {', '.join(_KINDS)}, with include_prompt"
        )
    return _KINDS[chosen[0]]


def _read_score_tokens(path: Path) -> tuple[int, ...]:
    fields = read_json_object(path)
    found = [fields.get(name) for name in ("false_token_id", "true_token_id")]
    if not all(isinstance(token_id, int) and token_id >= 0 for token_id in found):
        raise UnsupportedModelError(
            f"{path}: false_token_id and true_token_id are {found}, but must be two token ids"
        )
    return tuple(token_id for token_id in found if token_id is not None)


def _read_max_tokens(folder: Path) -> int | None:
    path = folder / "sentence_bert_config.json"
    value = read_json_object(path).get("max_seq_length") if path.is_file() else None
    return None if value is None else checked_integer(str(path), "max_seq_length", value)


def _read_activation(config: ModelConfig, raw: Mapping[str, Any]) -> Activation:
    """The activation that config.json names, or else the default for the number of scores."""
    inner = raw.get("sentence_transformers")
    said = inner.get("activation_fn") if isinstance(inner, dict) else None
    said = said or raw.get("sbert_ce_default_activation_function")
    if said is None:
        return Activation.SIGMOID if config.num_labels == 1 else Activation.SOFTMAX
    name = str(said).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"config.json: activation_fn is {shown(said)}; understood are {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]
