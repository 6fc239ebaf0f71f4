"""From the files of a checkpoint to the parameters of a model."""
