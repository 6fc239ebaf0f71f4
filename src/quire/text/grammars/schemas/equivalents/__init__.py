"""Keywords that the grammar engine lacks, as schemas that allow the same values."""
