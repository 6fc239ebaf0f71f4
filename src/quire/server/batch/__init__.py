"""`quire batch`: reads calls in OpenAI's batch format from a file, writes answers to another."""
