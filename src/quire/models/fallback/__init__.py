"""Models that classes of transformers compute, on quire's memory."""
