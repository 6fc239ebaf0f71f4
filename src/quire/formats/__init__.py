"""Weight formats: how a linear's weights are stored, filled and multiplied; one file each."""
