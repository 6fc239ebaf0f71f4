"""From a model folder to a model: its config, its modules, its weights."""
