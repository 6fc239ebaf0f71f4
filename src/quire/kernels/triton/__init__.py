"""The GPU kernels, in Triton: one operator in each file.

Only `support` can be imported if Triton is missing. If Triton is installed, importing this package
imports Triton too, which is slow, so an engine on the CPU does not import it.
"""

import importlib.util

if importlib.util.find_spec("triton") is not None:
    from quire.kernels.triton.interpreter import compute_as_gpus_do

    compute_as_gpus_do()
