"""A plugin of `mixed_kills`: steps verify all drafts, also those that would not pay.

With many streams of a small model the cost model chooses no drafts.
"""

from quire.assembly import build
from quire.core.scheduling.pacing import ConstantPacer

build.LearningPacer = ConstantPacer  # type: ignore[assignment, misc]
