"""Sentences about features that this version lacks, shared by the tables of this folder."""

POOLED_ADAPTERS = "adapters are served for models that generate text"
DRAFT_HEADS = (
    "this version drafts only with the heads 'mtp' and 'eagle3'; the option speculation names a"
    " proposer, such as 'ngram', and speculative_model a draft model"
)
EXPERTS = (
    "each rank computes its share of every expert; no rank has experts of its own, so that none are"
    " sent between ranks"
)
EXPERT_CHOICES = "the experts of each token are not returned"
EXPERT_KERNELS = "the kernels of experts are chosen by the device and the weights' format"
KV_FORMAT = "kv_cache_dtype says how keys and values are stored"
REPLICAS = (
    "`quire serve` starts engines by --replicas, on other machines by --agents, --ray-address"
)
TEXT_ONLY = "of media only images and videos are read, with the options that docs/images.md names"
TRANSFER = "no engine sends its KV cache to another; cache_dir keeps prefixes over restarts"
