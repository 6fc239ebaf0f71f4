"""`quire batch`: a file of calls in OpenAI's batch format, answered into another file."""
