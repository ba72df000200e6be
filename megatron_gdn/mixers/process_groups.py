"""The process groups of a built mixer. They may change, for example to evaluate at another size."""

from __future__ import annotations

import copy
from typing import Any, Self

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn

from .micro_batch import MicroBatches


class FollowsGroups(nn.Module):
    """Mixin of a mixer that follows its ``pg_collection``.

    Tensor-parallel ranks hold shares of the parameters, so these ranks cannot change. The
    context-parallel group may change between micro-batches; all ranks of the old and of the new
    group must change it together.
    """

    micro_batches: MicroBatches
    tp_group: Any
    _pg_collection: ProcessGroupCollection

    @property
    def pg_collection(self) -> ProcessGroupCollection:
        """Process groups; setting them sets the context-parallel group of later micro-batches.

        Raises:
            ValueError: other tensor-parallel ranks, or heads that headwise context parallelism
                cannot split over the new group. The groups stay what they were.
        """
        return self._pg_collection

    @pg_collection.setter
    def pg_collection(self, groups: ProcessGroupCollection) -> None:
        self.require_same_tensor_ranks(groups)
        self.micro_batches.use_group(groups.cp)
        self._pg_collection = groups
        self._name_sizes()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy of the layer with the same process groups, which cannot be copied themselves."""
        for module in self.modules():
            for thing in vars(module).values():
                if isinstance(thing, dist.ProcessGroup | ProcessGroupCollection):
                    memo[id(thing)] = thing
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__setstate__(copy.deepcopy(self.__dict__, memo))
        return made

    @property
    def cp_size(self) -> int:
        """Ranks of the context-parallel group.

        Raises:
            ValueError: set to another number than that.
        """
        return self._pg_collection.cp.size()

    @cp_size.setter
    def cp_size(self, size: int) -> None:
        if size != self.cp_size:
            raise ValueError(
                f"cp_size={size} and a context-parallel group of {self.cp_size} ranks: set "
                f"pg_collection, which the size follows."
            )

    def require_same_tensor_ranks(self, groups: ProcessGroupCollection) -> None:
        """Refuse groups under which other ranks would share this mixer's parameters.

        Raises:
            ValueError: names both.
        """
        tp, mine = getattr(groups, "tp", None), self.tp_group
        if tp is None or tp is mine or _ranks(tp) == _ranks(mine):
            return
        raise ValueError(
            f"pg_collection has a tensor-parallel group of {tp.size()} ranks {_ranks(tp)}, and "
            f"this layer holds its share of the parameters among {mine.size()} ranks "
            f"{_ranks(mine)}. Only the context-parallel group of a built layer can change."
        )

    def cp_group_of(self, groups: ProcessGroupCollection, context: Any) -> Any:
        """The context-parallel group of one forward that is called with these groups.

        Raises:
            ValueError: other tensor-parallel ranks.
            NotImplementedError: another number of ranks than the layer's, in generation.
        """
        self.require_same_tensor_ranks(groups)
        if context is not None and groups.cp.size() != self.cp_size:
            raise NotImplementedError(
                f"generation with a context-parallel group of {groups.cp.size()} ranks for one "
                f"forward, in a layer with {self.cp_size}: set the layer's pg_collection."
            )
        return groups.cp

    def _name_sizes(self) -> None:
        """Set the sizes that tools look up by name; a mixer with such names overrides this."""


def _ranks(group: Any) -> list[int]:
    return dist.get_process_group_ranks(group)
