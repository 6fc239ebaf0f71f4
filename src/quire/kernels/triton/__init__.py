"""The GPU kernels, in Triton: one operator a file.

Where Triton is missing, only `support` loads. Importing any of it imports Triton where that is
installed, so an engine on the CPU imports none.
"""

import importlib.util

if importlib.util.find_spec("triton") is not None:
    from quire.kernels.triton.interpreter import compute_as_gpus_do

    compute_as_gpus_do()
