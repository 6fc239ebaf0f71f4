"""Between text and token ids: tokenizers, chat templates, detokenizer."""
