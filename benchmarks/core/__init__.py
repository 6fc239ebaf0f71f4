"""Scheduler and memory without a model, beside vLLM's."""
