"""What this version does not serve, in the words of all that are asked for it.

Data; imported by the tables of names, options, methods and flags of other engines.
"""

POOLED_ADAPTERS = "adapters are served for models that generate text"
EXPERTS = "no model here has experts"
TEXT_ONLY = "models take text here"
TRANSFER = "the KV cache is not handed to other engines"
