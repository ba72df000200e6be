"""The KDA recurrence in plain torch: any device, dtype and head dim; repeatable bit for bit."""

from __future__ import annotations

from ...gdn.rule.plain import PlainRule
from .chunk_math import channel_chunks_of


class PlainKDA(PlainRule):
    """The chunk form in plain torch (:mod:`.chunk_math`) as a rule: ``backend="reference"``."""

    chunks = staticmethod(channel_chunks_of)
