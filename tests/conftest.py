"""What holds for all tests: no network, one torch thread, Hypothesis without a clock."""

import os

from hypothesis import settings

# Both are read when the libraries are first imported, and inherited by processes that tests start.
# One thread each: pytest and such a process would otherwise fight for the same few cores.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shared machine makes single examples slow at random; the timeout of pytest bounds whole tests.
settings.register_profile("quire", deadline=None)
settings.load_profile("quire")
